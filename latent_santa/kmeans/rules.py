"""What both engines share: the settings of Appendix A, and how they refuse rows."""

BATCH_SIZE = 4096
MAX_EPOCHS = 100
MAX_NO_IMPROVEMENT = 10
REASSIGNMENT_RATIO = 0.01


def refuse_nonfinite(problem: int) -> None:
    """Raise the error that names the first problem with a row that cannot be clustered."""
    raise ValueError(
        f"points[{problem}] has a real row that is not finite or whose squared norm overflows float32: "
        "give finite rows, and set lengths so that padding is not counted"
    )
