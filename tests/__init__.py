import os

if os.environ.get("LIGHTNING") == "pytorch_lightning":
    from tests.trainer.one_package import use_pytorch_lightning

    use_pytorch_lightning()
