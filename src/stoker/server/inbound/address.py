"""Addresses of peers and listeners: which are this machine's own. Needs nothing that answers requests."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=256)
def is_loopback(address: str) -> bool:
    """Whether an IP address, also an IPv4 one written as IPv6, is the machine's own loopback."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
