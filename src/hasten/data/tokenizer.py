"""A byte-level BPE tokenizer trained on the spot: for the demo and for models from nothing.

Every byte is a token of its own before any merge, so any text survives encoding and decoding
unchanged (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.2). The
special tokens carry DeepSeek's names, which no ordinary text contains.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hasten.data.chat_template import ensure_chat_template
from hasten.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SPECIAL = (PAD, BOS, EOS)  # ids 0, 1, 2
SMALLEST = 256 + len(SPECIAL)  # a token for every byte
_NO_LIMIT = 1 << 30  # tokens; the model's own limit is checked where the model is known


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` tokens, with the deepseek-llm chat template.

    The same texts in the same order give the same tokenizer. Few texts give fewer tokens than
    asked for. Raises InputError for a vocabulary without room for all bytes.
    """
    if vocab_size < SMALLEST:
        raise InputError(f"a vocabulary of {vocab_size} has no room for all bytes: {SMALLEST} do")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=_NO_LIMIT,
    )
    ensure_chat_template(tokenizer, "deepseek-llm")
    return tokenizer
