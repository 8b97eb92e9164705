"""The Hugging Face hub, when it does not answer: its libraries would try for half a minute."""

from collections.abc import Iterator
from contextlib import contextmanager

import huggingface_hub

_SECONDS = 5


def hub_is_out_of_reach() -> bool:
    """One short request; False as well when the user has said not to ask the hub at all."""
    if huggingface_hub.is_offline_mode():
        return False
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=_SECONDS)
    except Exception:
        # The HTTP library behind the hub's differs from version to version, and so do its errors.
        return True
    return False


@contextmanager
def datasets_from_cache_if_need_be() -> Iterator[None]:
    """Within, `datasets` looks only into its cache if the hub is out of reach."""
    import datasets  # a second to import, which only hub paths should cost

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or hub_is_out_of_reach()
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
