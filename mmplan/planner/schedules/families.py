"""The schedule families by name."""

from collections.abc import Callable

from mmplan.planner.schedule import Schedule
from mmplan.planner.schedules.dual_pipe_v import dual_pipe_v
from mmplan.planner.schedules.fused import eager_one_f_one_b, gpipe, one_f_one_b
from mmplan.planner.schedules.listed import depth_first, encoders_ahead, encoders_in_bubbles
from mmplan.planner.schedules.looped import interleaved, looped_bfs
from mmplan.planner.schedules.problem import NotApplicable, ScheduleProblem
from mmplan.planner.schedules.v_shape import v_half, v_min
from mmplan.planner.schedules.zb_automatic import zb_1p, zb_2p
from mmplan.planner.schedules.zb_v import zb_v
from mmplan.planner.schedules.zero_bubble import zb_h1, zb_h2
from mmplan.scenario.schedule_names import ScheduleName

Family = Callable[[ScheduleProblem], Schedule | NotApplicable]

FAMILIES: dict[ScheduleName, Family] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "depth-first": depth_first,
    "encoders-ahead": encoders_ahead,
    "encoders-in-bubbles": encoders_in_bubbles,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-1p": zb_1p,
    "zb-2p": zb_2p,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dual_pipe_v,
}
