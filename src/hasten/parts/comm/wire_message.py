"""What all codecs share: the memory of a message, and sentences on arguments that don't fit."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 16  # bytes: a view in any number format may begin there


def padded(size: int) -> int:
    """The bytes of a part of a message, so that the next begins where it may."""
    return -(-size // ALIGNED) * ALIGNED


def checked(flat: Tensor, residual: Tensor | None = None, kept: Tensor | None = None) -> Tensor:
    """Numbers to encode, detached; the other two are the memory of what is left out, float32.

    Raises:
        ValueError: not flat, with gaps, in another format, or not of one length and device.
    """
    if flat.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"codecs encode float32 and bf16, not {flat.dtype}: convert it before")
    _check_plain(flat, "what is encoded")
    for name, tensor in (("the residual", residual), ("what is kept", kept)):
        if tensor is not None:
            _check_numbers(tensor, len(flat), flat.device, name)
    return flat.detach()


def message_for(out: Tensor | None, size: int, flat: Tensor) -> Tensor:
    """``out`` if it fits, or new memory for a message.

    Raises:
        ValueError: ``out`` isn't of this size, or begins where no view can.
    """
    if out is None:
        return torch.empty(size, dtype=torch.uint8, device=flat.device)
    if out.device != flat.device:
        raise ValueError(f"the message is on {out.device} and the numbers on {flat.device}")
    check_message(out, size)
    return out


def check_message(message: Tensor, size: int) -> None:
    """One message of ``size`` bytes.

    Raises:
        ValueError: another length, format, or a beginning where no view can begin.
    """
    _check_plain(message, "a message")
    _check_bytes(message, size)


def check_messages(messages: Tensor, size: int) -> None:
    """Messages of several ranks, (ranks, size).

    Raises:
        ValueError: another shape or format, or none at all.
    """
    if messages.dim() != 2 or not len(messages) or not messages.is_contiguous():
        shape = tuple(messages.shape)
        raise ValueError(f"messages are rows without gaps, (ranks, {size} bytes), not {shape}")
    _check_bytes(messages, size)


def result_for(out: Tensor | None, numbers: int, message: Tensor, add: bool) -> Tensor:
    """``out`` if it fits, or new memory for the decoded numbers.

    Raises:
        ValueError: ``out`` isn't float32 numbers of that length, or there is nothing to add to.
    """
    if out is None:
        if add:
            raise ValueError("there is nothing to add to: give out, or leave add away")
        return torch.empty(numbers, dtype=torch.float32, device=message.device)
    _check_numbers(out, numbers, message.device, "out")
    return out


def _check_bytes(message: Tensor, size: int) -> None:
    if message.dtype != torch.uint8 or message.shape[-1] != size:
        told = f"{message.shape[-1]} of {message.dtype}"
        raise ValueError(f"a message of these numbers is {size} of torch.uint8, not {told}")
    if message.storage_offset() % ALIGNED:
        raise ValueError(
            f"a message begins at a multiple of {ALIGNED} bytes of its memory, "
            f"not at {message.storage_offset()}"
        )


def _check_numbers(tensor: Tensor, numbers: int, device: torch.device, name: str) -> None:
    if tensor.dtype != torch.float32:
        raise ValueError(f"{name} must be float32, not {tensor.dtype}")
    _check_plain(tensor, name)
    if len(tensor) != numbers or tensor.device != device:
        told = f"{len(tensor)} on {tensor.device}"
        raise ValueError(f"{name} must be {numbers} numbers on {device}, not {told}")


def _check_plain(tensor: Tensor, name: str) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be flat and without gaps, not of shape {tuple(tensor.shape)} "
            f"and strides {tensor.stride()}"
        )
