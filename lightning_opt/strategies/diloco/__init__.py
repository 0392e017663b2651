"""DiLoCo: replicas train on their own, and average their weight changes at intervals."""
