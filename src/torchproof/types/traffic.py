"""The requests that a decision must hold for."""

from torchproof.types.record import Record


class Traffic(Record):
    """A summary of the sampled requests.

    Attributes:
        source: ``samples()`` or the traffic file's name.
        num_requests: requests sampled.
        sizes: for each variable dim, its size in every sampled request, ascending.
    """

    source: str
    num_requests: int
    sizes: dict[str, tuple[int, ...]]
