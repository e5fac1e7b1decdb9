"""What is done to many frames at once: finding them, taking them, and marking which of them have changed."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Int32, Int64, UInt8
from elastable.embedding_store.native.kernel import kernel

__all__ = [
    "CHANGED",
    "CLEAN",
    "FREE",
    "HELD",
    "HOTTEST",
    "TAKEN",
    "WRITING",
    "collect_changed",
    "frames_at",
    "mark_changed",
    "mark_written",
    "put_in",
    "take_frames",
]


FREE, TAKEN = -1, -2
"""In place of a frame's position: nobody has it, and it is about to be given to a row."""

CLEAN, CHANGED, WRITING = 0, 1, 2
"""State of a row: as in the tier; not written since it changed; being written as it was."""

HOTTEST, HELD = 3, 255
"""Heat: the highest that reading gives; and that of a frame that must not be taken."""


@kernel
def frames_at(frame_of: Int32, heat: UInt8, positions: Int64, frames: Int64, cold: Int64, warm: bool) -> int:
    """Finds the frame of each position.

    Args:
        frame_of: int32 `[rows]`: 1 + the frame of each position, 0: it has none.
        heat: uint8 `[frames]`, rises where `warm`.
        positions: int64 `[n]`; negative ones have no frame and are not cold.
        frames: int64 `[n]`, gets the frame, -1 for none.
        cold: int64 `[n]`, gets the indices of those that have none.
        warm: Whether this counts as a use.

    Returns:
        How many are cold.
    """
    count = 0
    for i in range(len(positions)):
        position = positions[i]
        if position < 0:
            frames[i] = -1
            continue
        frame = np.int64(frame_of[position]) - 1
        frames[i] = frame
        if frame < 0:
            cold[count] = i
            count += 1
        elif warm and heat[frame] < HOTTEST:
            heat[frame] += 1
    return count


@kernel
def take_frames(
    frame_of: Int32, position_of: Int64, heat: UInt8, state: UInt8, hand: int, most: int, taken: Int64
) -> tuple[int, int]:
    """Takes frames for other rows, from `hand` on: free ones, and those of clean rows that were not used lately.

    Args:
        frame_of: As of `frames_at`.
        position_of: int64 `[frames]`, whose each frame is, `FREE` or `TAKEN`.
        heat: uint8 `[frames]`; falls where the hand passes.
        state: uint8 `[frames]`.
        hand: The frame to begin with.
        most: Frames to look at.
        taken: int64 `[n]`, gets the frames.

    Returns:
        How many were taken, n at most, and the next hand.
    """
    count, frames = 0, len(position_of)
    for _ in range(most):
        if count == len(taken):
            break
        frame = hand
        hand = 0 if hand + 1 == frames else hand + 1
        position = position_of[frame]
        if position == TAKEN:
            continue
        if position >= 0:
            if state[frame] != CLEAN or heat[frame] == HELD:
                continue
            if heat[frame] > 0:
                heat[frame] -= 1
                continue
            frame_of[position] = 0
        position_of[frame] = TAKEN
        heat[frame] = 0
        taken[count] = frame
        count += 1
    return count, hand


@kernel
def put_in(frame_of: Int32, position_of: Int64, positions: Int64, frames: Int64) -> None:
    """Gives frames that were taken to positions, both int64 `[n]`."""
    for i in range(len(positions)):
        frame_of[positions[i]] = frames[i] + 1
        position_of[frames[i]] = positions[i]


@kernel
def mark_changed(state: UInt8, frames: Int64) -> None:
    """The rows in these frames, int64 `[n]`, are about to change."""
    for i in range(len(frames)):
        state[frames[i]] = CHANGED


@kernel
def collect_changed(state: UInt8, cursor: int, end: int, frames: Int64) -> tuple[int, int]:
    """Finds rows that have changed, from frame `cursor` to `end`, and marks them as being written.

    Returns:
        How many were found, at most as many as `frames` int64 `[n]` has room for, and the next cursor.
    """
    count = 0
    while cursor < end and count < len(frames):
        if state[cursor] == CHANGED:
            state[cursor] = WRITING
            frames[count] = cursor
            count += 1
        cursor += 1
    return count, cursor


@kernel
def mark_written(state: UInt8, frames: Int64, now: int) -> None:
    """Rows that were being written are `now` clean, or changed as before; others have changed since, or are gone."""
    for i in range(len(frames)):
        if frames[i] >= 0 and state[frames[i]] == WRITING:
            state[frames[i]] = now
