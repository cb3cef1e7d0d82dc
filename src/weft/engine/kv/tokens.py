"""Token ids as int32 arrays, the form that sequences, prefixes and messages hold.

An array is copied, compared, hashed and sent in one operation. A list costs one operation per token, a good part of a
millisecond for 8,192 tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TOKEN_TYPE = "i"
"""Type code of int32 for `array`."""
TOKEN_BYTES = array(TOKEN_TYPE).itemsize
HELD = -1
"""Token of a draft that ranks hold."""


def token_array(tokens: Sequence[int] | bytes) -> array[int]:
    """Return tokens, or their bytes, as an array. Raises OverflowError if a token does not fit int32."""
    return array(TOKEN_TYPE, tokens)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return the bytes of `token_array`."""
    return token_array(tokens).tobytes()
