"""A character tokenizer of 99 tokens that fits the small test networks."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
CHARACTERS = (string.ascii_letters + string.digits + string.punctuation.replace("~", "") + " \n")[:95]
VOCABULARY = {token: number for number, token in enumerate(SPECIAL + tuple(CHARACTERS))}


def character_tokenizer(*, padding: bool = True, encoder: bool = False) -> PreTrainedTokenizerFast:
    """Return the tokenizer; encoders add [CLS] and [SEP], with token types for pairs."""
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    if encoder:
        core.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", VOCABULARY["[CLS]"]), ("[SEP]", VOCABULARY["[SEP]"])],
        )
    names = {"unk_token": "[UNK]", "eos_token": "[SEP]"} | ({"pad_token": "[PAD]"} if padding else {})
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if encoder else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=inputs, **names)
