"""What of a backward can wait: the estimate of planner, simulator and emulated devices alike."""


def weight_part_ns(forward_ns: int, backward_ns: int) -> int:
    """Time of the matrices' own gradients within a backward.

    They take as many operations as the forward's products (Qi et al. 2023, section 2), and the
    input's gradient takes at least as many.
    """
    return min(forward_ns, backward_ns // 2)
