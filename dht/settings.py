"""The constants of the DHT."""

from __future__ import annotations

import attrs

from dht.lookup import LookupSettings
from dht.store import StoreLimits
from dht.table import TableSettings


@attrs.frozen(kw_only=True)
class DhtSettings:
    """How a node of the DHT behaves. Times are in seconds. `k` and `alpha` hold for the table and lookups, too."""

    k: int = 20  # contacts in a bucket, holders of a record
    alpha: int = 3  # questions of a lookup that are under way at once
    table: TableSettings = attrs.field(factory=TableSettings)
    lookup: LookupSettings = attrs.field(factory=LookupSettings)
    store: StoreLimits = attrs.field(factory=StoreLimits)
    rate: float = 50.0  # requests a second that one peer may make
    burst: int = 200
    origin_rate: float = 500.0  # requests a second that all peers of one address may make
    origin_burst: int = 2000

    request_timeout: float = 3.0  # with connecting; up to twice as long where round trips are long
    slow_after: float = 1.0  # a lookup asks somebody else meanwhile
    lookup_limit: float = 10.0
    readers: int = 5  # holders that a reader asks
    corrections: int = 16  # records that one reader sends to one holder

    first_refresh: float = 1.0  # doubles each time until one of the next two
    refresh_small: float = 30.0  # as long as the table has less than k contacts
    refresh: float = 300.0
    bucket_age: float = 900.0  # a bucket without a lookup for so long gets one
    liveness: float = 10.0  # a contact is not left alone for longer, as far as `alpha` pings at a time allow

    bootstrap_grace: float = 1.0  # once one bootstrap peer has answered, the others have so long
    connect_timeout: float = 10.0
    saved: int = 50  # contacts to be kept for the next start
