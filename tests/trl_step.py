"""recipes/trl_ada.py as a test wants it, with FSDP on CPUs. Also a program:

    accelerate launch ... tests/trl_step.py FOLDER --sampler ada-pos ...

takes one optimizer step and writes FOLDER/rank-0.pt and so on, each with the gradient (which is the
same) and the process's own pools.
"""
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "recipes")]
STEP = ["--steps", "1", "--max-tokens", "24", "--lr", "1e-9", "--max-grad-norm", "0",
        "--warmup-steps", "1", "--batch-prompts", "6"]


def one_step(recipe, flags: list[str]):
    """(trainer, [gradient of each optimizer step]). The learning rate is next to 0, and so is no
    B of the adapter, or A would have no gradient."""
    import torch
    from transformers import TrainerCallback

    from recipes.trl_engine import whole
    from rewards import open_grader

    found = []

    class Record(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            found.append({name.removeprefix("module."): whole(p.grad).clone()
                          for name, p in model.named_parameters() if p.grad is not None})

    own, asked = recipe.parse([*STEP, *flags])
    with open_grader("", 0.7) as grader:
        trainer = recipe.make_trainer(own, asked, grader)
        torch.manual_seed(0)
        for name, p in trainer.model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0, 0.02)
        trainer.add_callback(Record())
        trainer.train()
    return trainer, found


def pools_of(groups) -> dict:
    """{problem id: [token ids of each sample in the order of drawing]}"""
    return {group.problem.id: [s.rollout.token_ids for s in group.pool] for group in groups}


def allow_fsdp_on_cpu(recipe) -> None:
    """torch has it there. Accelerate's lines are those that it has for GPUs."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    usual, recipe.needs_gpu = AcceleratorState.__init__, lambda flags: False

    def init(self, *args, fsdp_plugin=None, **rest):
        usual(self, *args, fsdp_plugin=fsdp_plugin, **rest)
        if fsdp_plugin and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    import torch
    import trl_ada

    allow_fsdp_on_cpu(trl_ada)
    trainer, (gradient,) = one_step(trl_ada, sys.argv[2:])
    torch.save(dict(gradient=gradient, pools=pools_of(trainer.groups)),
               f"rank-{os.environ['RANK']}.pt")
