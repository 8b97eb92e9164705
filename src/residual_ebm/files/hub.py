"""The Hugging Face hub, when it does not answer: its libraries would try for half a minute."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import huggingface_hub

_SECONDS = 5


def hub_is_out_of_reach() -> bool:
    """One short request; False as well when the user has said not to ask the hub at all."""
    if huggingface_hub.is_offline_mode():
        return False
    request = urllib.request.Request(huggingface_hub.constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_SECONDS).close()
    except urllib.error.HTTPError as answer:
        answer.close()  # a refusal is an answer too
    except (OSError, http.client.HTTPException):
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
