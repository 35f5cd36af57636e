"""The compared methods of attention, one file each. A new method is its file and a line here."""

from .absorbed import AbsorbedDense
from .base import Method
from .centroid import Centroid
from .dense import Dense
from .gumbel_rows import GumbelRows
from .h2o import H2O
from .infllm import InfLLM
from .magicpig import MagicPIG
from .oracle_rows import OracleRows
from .oracle_teams import OracleTeams
from .page_mean import PageMean
from .quest import Quest
from .rope_blocks import RopeBlocks
from .santa import Santa
from .santapp import SantaPlusPlus
from .snapkv import SnapKV
from .sparq import SparQ
from .streaming_llm import StreamingLLM
from .top_teams import TopTeams
from .tova import Tova
from .uncorrected import Uncorrected

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        SantaPlusPlus(),
        Santa(),
        GumbelRows(),
        Centroid(),
        OracleRows(),
        OracleTeams(),
        TopTeams(),
        Uncorrected(),
        Quest(),
        PageMean(),
        RopeBlocks(),
        InfLLM(),
        SparQ(),
        StreamingLLM(),
        SnapKV(),
        Tova(),
        H2O(),
        MagicPIG(),
        AbsorbedDense(),
        Dense(),
    )
}

__all__ = ["METHODS", "Method"]
