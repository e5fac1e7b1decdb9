"""Ids of strings: the 64 bits of FarmHash's `Fingerprint64`, the same from every language.

`Fingerprint64` (https://github.com/google/farmhash, `farmhashna::Hash64`) is a fixed function of a string's bytes,
promised never to change. So an id is known wherever rows are read: TensorFlow (`tf.fingerprint`), BigQuery
(`FARM_FINGERPRINT`), Guava (`Hashing.farmHashFingerprint64`), ClickHouse (`farmFingerprint64`), the `farmhash` packages
of Go, Rust and JavaScript. A string is its UTF-8; the 64 bits are the id's two's complement. There is no seed: one
string is one id in every table.

Among n strings some two share an id, and so a row, with a probability of about n^2 / 2^65: one in 37 for 10^9 of them.
"""

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64, UInt8, UInt64
from elastable.embedding_store.errors import BadIds
from elastable.embedding_store.native.intrinsics import word_at
from elastable.embedding_store.native.kernel import kernel

_U = np.uint64
_K0, _K1, _K2 = _U(0xC3A5C85C97CB3127), _U(0xB492B66FBE98F273), _U(0x9AE16A3B2F90404F)


def hash_ids(strings: npt.ArrayLike) -> Int64:
    """The ids that `et.Embedding` gives strings.

    Args:
        strings: `str` or `bytes`, or an array or nested list of them, of any shape.

    Returns:
        int64, of the same shape.

    Raises:
        BadIds: something that is no string; numbers are ids already.
    """
    texts = np.asarray(strings)
    if texts.dtype.kind not in "SUO":
        raise BadIds(f"hash_ids takes strings, got {texts.dtype}: integers are ids as they are")
    encoded = [_encoded(text) for text in np.asarray(strings, object).ravel()]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(text) for text in encoded], dtype=np.int64)])
    ids = np.empty(len(encoded), np.uint64)
    _hash_all(np.frombuffer(b"".join(encoded), np.uint8), starts, ids)
    return ids.view(np.int64).reshape(texts.shape)


def _encoded(text: object) -> bytes:
    if isinstance(text, str):
        return text.encode()
    if isinstance(text, bytes):
        return bytes(text)
    raise BadIds(f"hash_ids takes strings, got {text!r}, a {type(text).__name__}")


@kernel
def _hash_all(text: UInt8, starts: Int64, ids: UInt64) -> None:
    for i in range(len(ids)):
        ids[i] = _fingerprint(text, starts[i], starts[i + 1] - starts[i])


@kernel
def _fingerprint(text: UInt8, start: int, length: int) -> _U:
    if length > 64:
        return _of_many(text, start, length)
    if length > 32:
        return _of_33_to_64(text, start, length)
    if length > 16:
        return _of_17_to_32(text, start, length)
    return _of_0_to_16(text, start, length)


@kernel
def _of_0_to_16(text: UInt8, start: int, length: int) -> _U:
    mul = _K2 + _U(length) * _U(2)
    if length >= 8:
        a = word_at(text, start) + _K2
        b = word_at(text, start + length - 8)
        c = _rotated(b, 37) * mul + a
        d = (_rotated(a, 25) + b) * mul
        return _mixed(c, d, mul)
    if length >= 4:
        return _mixed(_U(length) + (_half_word(text, start) << _U(3)), _half_word(text, start + length - 4), mul)
    if length > 0:
        y = _U(text[start]) + (_U(text[start + (length >> 1)]) << _U(8))
        z = _U(length) + (_U(text[start + length - 1]) << _U(2))
        return _shift_mixed(y * _K2 ^ z * _K0) * _K2
    return _K2


@kernel
def _of_17_to_32(text: UInt8, start: int, length: int) -> _U:
    mul = _K2 + _U(length) * _U(2)
    a, b = word_at(text, start) * _K1, word_at(text, start + 8)
    c, d = word_at(text, start + length - 8) * mul, word_at(text, start + length - 16) * _K2
    return _mixed(_rotated(a + b, 43) + _rotated(c, 30) + d, a + _rotated(b + _K2, 18) + c, mul)


@kernel
def _of_33_to_64(text: UInt8, start: int, length: int) -> _U:
    mul = _K2 + _U(length) * _U(2)
    a, b = word_at(text, start) * _K2, word_at(text, start + 8)
    c, d = word_at(text, start + length - 8) * mul, word_at(text, start + length - 16) * _K2
    y = _rotated(a + b, 43) + _rotated(c, 30) + d
    z = _mixed(y, a + _rotated(b + _K2, 18) + c, mul)
    e, f = word_at(text, start + 16) * mul, word_at(text, start + 24)
    g, h = (y + word_at(text, start + length - 32)) * mul, (z + word_at(text, start + length - 24)) * mul
    return _mixed(_rotated(e + f, 43) + _rotated(g, 30) + h, e + _rotated(f + a, 18) + g, mul)


@kernel
def _of_many(text: UInt8, start: int, length: int) -> _U:
    seed = _U(81)
    x, y = seed * _K2 + word_at(text, start), seed * _K1 + _U(113)
    z = _shift_mixed(y * _K2 + _U(113)) * _K2
    v0 = v1 = w0 = w1 = _U(0)
    at, end = start, start + ((length - 1) // 64) * 64
    last = end + ((length - 1) & 63) - 63
    while at != end:
        x, y, z, v0, v1, w0, w1 = _round(text, at, x, y, z, v0, v1, w0, w1, _K1, _U(1))
        at += 64
    mul = _K1 + ((z & _U(0xFF)) << _U(1))
    w0 += _U((length - 1) & 63)
    v0 += w0
    w0 += v0
    x, y, z, v0, v1, w0, w1 = _round(text, last, x, y, z, v0, v1, w0, w1, mul, _U(9))
    return _mixed(_mixed(v0, w0, mul) + _shift_mixed(y) * _K0 + z, _mixed(v1, w1, mul) + x, mul)


@kernel
def _round(
    text: UInt8, at: int, x: _U, y: _U, z: _U, v0: _U, v1: _U, w0: _U, w1: _U, mul: _U, factor: _U
) -> tuple[_U, _U, _U, _U, _U, _U, _U]:
    """64 bytes into the seven words of state; the last round weighs w1 and v0 by 9."""
    x = _rotated(x + y + v0 + word_at(text, at + 8), 37) * mul
    y = _rotated(y + v1 + word_at(text, at + 48), 42) * mul
    x ^= w1 * factor
    y += v0 * factor + word_at(text, at + 40)
    z = _rotated(z + w0, 33) * mul
    v0, v1 = _weak(text, at, v1 * mul, x + w0)
    w0, w1 = _weak(text, at + 32, z + w1, y + word_at(text, at + 16))
    return z, y, x, v0, v1, w0, w1


@kernel
def _weak(text: UInt8, at: int, a: _U, b: _U) -> tuple[_U, _U]:
    a += word_at(text, at)
    b = _rotated(b + a + word_at(text, at + 24), 21)
    c = a
    a += word_at(text, at + 8) + word_at(text, at + 16)
    b += _rotated(a, 44)
    return a + word_at(text, at + 24), b + c


@kernel
def _mixed(u: _U, v: _U, mul: _U) -> _U:
    a = (u ^ v) * mul
    a ^= a >> _U(47)
    b = (v ^ a) * mul
    b ^= b >> _U(47)
    return b * mul


@kernel
def _shift_mixed(value: _U) -> _U:
    return value ^ (value >> _U(47))


@kernel
def _rotated(value: _U, bits: int) -> _U:
    return (value >> _U(bits)) | (value << _U(64 - bits))


@kernel
def _half_word(text: UInt8, at: int) -> _U:
    """Four bytes, the lowest first."""
    value = _U(0)
    for place in range(4):
        value |= _U(text[at + place]) << _U(8 * place)
    return value
