"""Token ids side by side as int32: so sequences, prefixes and messages hold them.

A prompt is copied, compared, hashed and sent at once then, where a list of numbers is looked at one by one: of 8,192
that takes a good part of a millisecond, each time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TOKEN_TYPE = "i"
"""Of `array`."""
TOKEN_BYTES = array(TOKEN_TYPE).itemsize


def token_array(tokens: Sequence[int] | bytes) -> array[int]:
    """Tokens, or their bytes, as an array. Raises OverflowError for what is no int32."""
    return array(TOKEN_TYPE, tokens)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """The bytes of `token_array`."""
    return token_array(tokens).tobytes()
