"""What each callback inherits: its state belongs to one model, and that of a run is not copied."""

import copy

from lightning_opt.trainer.run_callback import RunCallback
from tests.helpers.models import SmallNet
from tests.helpers.trainers import quiet_trainer


class Learns(RunCallback):
    not_pickled = ("trainer",)

    def __init__(self):
        self.resets, self.trainer = 0, None

    def on_train_start(self, trainer, pl_module):
        self.trainer = trainer

    def reset_for_model(self, pl_module):
        self.resets += 1


def test_only_a_fit_of_another_model_resets():
    callback, models = Learns(), [SmallNet(), SmallNet()]
    trainer = quiet_trainer(callbacks=[callback], max_epochs=1)
    for action, model, resets in (
        (trainer.fit, models[0], 1),
        (trainer.validate, models[1], 1),
        (trainer.fit, models[0], 1),
        (trainer.fit, models[1], 2),
    ):
        action(model)
        assert callback.resets == resets
    copied = copy.deepcopy(callback)
    assert (copied.trainer, copied.resets) == (None, 2)
