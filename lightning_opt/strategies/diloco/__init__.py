"""DiLoCo: replicas that train by themselves, and now and then apply what all of them have moved."""
