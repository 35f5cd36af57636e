"""Integer arithmetic that Python has no name for."""


def ceil_div(a: int, b: int) -> int:
    """The least integer that is at least a / b."""
    return -(-a // b)
