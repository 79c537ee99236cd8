"""How many microbatches a stage holds at its peak, chunk by chunk, for each schedule."""

from mmplan.planner.degrees import ScheduleKind


def in_flight_chunks(schedule: ScheduleKind, pp: int, stage: int, vp: int, microbatches: int) -> tuple[int, ...]:
    """Microbatches alive in each chunk of a stage when the stage holds most.

    1f1b: pp - stage (arXiv 2104.04473, section 2.2.1). gpipe: all (arXiv 1811.06965). interleaved: the warm-up of
    Megatron-LM schedules.py, (pp - stage - 1) * 2 + (vp - 1) * pp chunk forwards and the one after it, dealt to chunks
    in groups of pp. zb-1p, zb-2p: the automatic schedules of arXiv 2401.10241 (section 3) fill the memory that they
    are given, pp or 2 pp microbatches, on every stage. zb-v: pp microbatches in each of its two chunks (section 5.2 of
    arXiv 2401.10241v2: the memory of 1F1B's first stage on all).
    """
    match schedule:
        case "gpipe":
            return (microbatches,) * vp
        case "1f1b":
            return (min(microbatches, pp - stage),)
        case "zb-1p":
            return (min(microbatches, pp),)
        case "zb-2p":
            return (min(microbatches, 2 * pp),)
        case "zb-v":
            return (min(microbatches, pp),) * vp
        case "interleaved":
            forwards = min(microbatches * vp, (pp - stage - 1) * 2 + (vp - 1) * pp + 1)
            counts = [0] * vp
            for index in range(forwards):
                counts[index // pp % vp] += 1
            return tuple(counts)
