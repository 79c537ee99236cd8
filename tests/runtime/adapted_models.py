"""LLaVA as someone trains it by low-rank adapters of their own: queries and values of the language model have one."""

from ghost_models import Case, llava
from torch import Tensor, nn

RANK, TARGETS = 4, ("q", "v")


class Adapted(nn.Module):
    """A frozen linear and what is learned beside it, nothing at first."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.low = nn.Linear(base.in_features, RANK, bias=False)
        self.high = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.high.weight)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + self.high(self.low(x))
        return made


def adapted() -> Case:
    build, batch = llava()

    def model() -> nn.Module:
        made = build()
        text = [module for name, module in made.named_modules() if "language_model" in name or name == "lm_head"]
        for module in text:
            module.requires_grad_(False)
        for name, module in list(made.named_modules()):
            if "language_model" in name and name.endswith(("q_proj", "v_proj")):
                assert isinstance(module, nn.Linear)
                owner, _, own = name.rpartition(".")
                setattr(made.get_submodule(owner), own, Adapted(module))
        return made

    return model, batch
