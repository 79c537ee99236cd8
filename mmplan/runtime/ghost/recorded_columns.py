"""What glue does, in a recording, with logits whose columns ranks may share: followed up to cross entropy, or needed
whole."""

from collections import Counter
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from mmplan.runtime.ghost.cut_columns import CutColumns, FollowColumns, cut_columns


class RecordedColumns:
    """Attributes: whole: heads whose logits glue needs whole; labelled: rows of logits of each head that cross entropy
    is computed of."""

    def __init__(self) -> None:
        self.whole = set[str]()
        self.labelled = Counter[str]()

    def carried(self, head: str, logits: Tensor) -> CutColumns:
        """What a head returned, as glue holds it."""
        follow = FollowColumns(
            size=logits.shape[-1], whole=lambda: self.whole.add(head), total=partial(self._total, head)
        )
        return cut_columns(logits, follow)

    def _total(self, head: str, logits: Tensor, labels: Tensor) -> Tensor:
        self.labelled[head] += len(labels)
        return F.cross_entropy(logits, labels, reduction="sum")
