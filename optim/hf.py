"""Hugging Face's `Trainer` as a peer. Needs transformers and accelerate, which Shoal does not install."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from optim.machine import Machine
from optim.optimizer import LowCommunicationOptimizer
from optim.recipe import Recipe
from protocol.collective import Collective
from protocol.errors import SettingsError


class ShoalCallback(TrainerCallback):
    """Has a `Trainer` train with others.

        trainer = Trainer(model, arguments, train_dataset=data)
        ShoalCallback(swarm, recipe("diloco", inner_steps=500)).attach(trainer)
        trainer.train()

    Whatever optimizer the trainer would use becomes the inner one. Schedulers, accumulation, clipping and mixed
    precision are the trainer's. Its checkpoints hold the outer state as well, so `resume_from_checkpoint` goes on with
    it. All peers must start from the same values.

    At the end of training the run is finished, see `LowCommunicationOptimizer.finish`, and the model has the outer
    parameters; unless the trainer loads the best model in the end, which then stays.

    Args:
        swarm: As for `LowCommunicationOptimizer`; with several processes, a `Machine`.
        method: The recipe.
        tokens_per_step: What one step counts for in the mean, beside the steps of other peers.
    """

    def __init__(self, swarm: Collective | Machine, method: Recipe, *, tokens_per_step: int = 1) -> None:
        self._swarm, self._method, self._tokens_per_step = swarm, method, tokens_per_step
        self._optimizer: LowCommunicationOptimizer | None = None

    @property
    def optimizer(self) -> LowCommunicationOptimizer:
        """The trainer's optimizer: `rounds` says how many exchanges there were.

        Raises:
            SettingsError: The training has not begun.
        """
        if self._optimizer is None:
            raise SettingsError("the training has not begun")
        return self._optimizer

    def attach(self, trainer: Trainer) -> None:
        """Makes it the trainer's. Before `train`.

        Raises:
            SettingsError: The trainer shards the model by itself, after the optimizer is made.
        """
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise SettingsError(
                "the trainer shares the model among processes by FSDP or DeepSpeed",
                hint="Let it use DistributedDataParallel, or write the loop yourself around fully_shard.",
            )
        create: Callable[..., torch.optim.Optimizer] = trainer.create_optimizer

        # Here and not when training begins: by then the trainer has wrapped its optimizer, and loaded its state.
        def create_optimizer(*arguments: object, **options: object) -> torch.optim.Optimizer:
            inner = create(*arguments, **options)
            if self._optimizer is None:  # else it trains again, and has wrapped ours
                trainer.optimizer = self._optimizer = LowCommunicationOptimizer(
                    trainer.model, inner, self._swarm, self._method, tokens_per_step=self._tokens_per_step
                )
                return self._optimizer
            return inner

        trainer.create_optimizer = create_optimizer
        trainer.add_callback(self)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Finishes the run."""
        if args.load_best_model_at_end:
            self.optimizer.close()
        else:
            self.optimizer.finish()
