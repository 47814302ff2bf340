"""Which class the model of a folder is, by its model_type (SPEC K1): what keeps states cannot go back.

Apart because it is a table that grows with the families. A type that is in none of them is a decoder, as
nearly all are; whether a backend computes it is the backend's to say.
"""

from __future__ import annotations

from stoker.errors import UnsupportedError
from stoker.ipc.model import ModelClass

_RECURRENT = frozenset({"mamba", "falcon_mamba", "mamba2", "rwkv7"})
_HYBRID = frozenset(
    {
        *("baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "falcon_h1", "gear"),
        *("granitemoehybrid", "jamba", "kimi_k3", "kimi_linear", "lfm2", "lfm2-vl", "lfm2_moe"),
        *("longcat_flash_ngram", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "prism_hadamard_qwen35"),
    }
)
_OTHERS = {
    **dict.fromkeys(
        ("bert", "distilbert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "deberta-v2", "mpnet"),
        "an encoder, which is served from a GGUF file",
    ),
    **dict.fromkeys(("t5", "mt5", "umt5", "bart", "mbart", "marian"), "an encoder-decoder"),
    **dict.fromkeys(("whisper", "wav2vec2", "hubert"), "a model of speech"),
    **dict.fromkeys(("clip", "siglip", "vit", "dinov2"), "a model of images alone"),
    **dict.fromkeys(("llada", "dream"), "a diffusion language model, which is not generated step by step"),
}


def class_of(model_type: str, *, file: str) -> ModelClass:
    """The class of a model_type.

    Raises:
        UnsupportedError: it is known to be no language model that generates.
    """
    if model_type in _OTHERS:
        text = f"{file}: {model_type!r} is {_OTHERS[model_type]}; folders of models that generate are served"
        raise UnsupportedError(text, architecture=model_type, path=file)
    if model_type in _RECURRENT:
        return ModelClass.RECURRENT
    return ModelClass.HYBRID if model_type in _HYBRID else ModelClass.DECODER
