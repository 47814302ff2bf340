"""The class of a model by the architecture its file names (SPEC K1).

Lists what the bundled llama.cpp can run as a language model; anything else is refused before any native load.
"""

from __future__ import annotations

from stoker.errors import UnsupportedError
from stoker.ipc.model import ModelClass

_DECODERS = frozenset(
    """
    llama llama4 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bloom stablelm qwen qwen2
    qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe phi2 phi3 phimoe plamo plamo3 codeshell orion internlm2
    minicpm minicpm3 gemma gemma2 gemma3 gemma3n gemma4 starcoder2 xverse command-r cohere2 cohere2moe dbrx
    olmo olmo2 olmoe openelm arctic deepseek deepseek2 deepseek2-ocr deepseek32 chatglm glm4 glm4moe glm-dsa
    bitnet jais jais2 nemotron exaone exaone4 exaone-moe granite granitemoe graniteswitch granite_swa
    chameleon plm bailingmoe bailingmoe2 dots1 dots3note arcee afmoe laguna ernie4_5 ernie4_5-moe hunyuan-moe
    hunyuan-dense hunyuan_vl hy_v3 hy_v4 smollm3 gpt-oss smallthinker seed_oss grovemoe apertus minimax-m2
    minimax-m3 cogvlm pangu-embedded mistral3 mistral4 paddleocr mimo2 step35 maincoder mellum nanbeige
    spark2_5 talkie maple muse-glimmer hrm_text
    """.split()  # noqa: SIM905 - a hundred names read better as text
)
_ENCODERS = frozenset(
    """
    bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding
    llama-embed t5encoder
    """.split()  # noqa: SIM905
)
_ENCODER_DECODERS = frozenset({"t5"})
_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_HYBRID = frozenset(
    """
    jamba falcon-h1 plamo2 granitehybrid lfm2 lfm2moe nemotron_h nemotron_h_moe qwen3next kimi-linear
    bailingmoe3 kimi-k3 glm5-next qwen35 qwen35moe qwen4exp deepseek4 minimax-01
    """.split()  # noqa: SIM905
)
_CLASSES = (
    (_DECODERS, ModelClass.DECODER),
    (_ENCODERS, ModelClass.ENCODER),
    (_ENCODER_DECODERS, ModelClass.ENCODER_DECODER),
    (_RECURRENT, ModelClass.RECURRENT),
    (_HYBRID, ModelClass.HYBRID),
)
_NEITHER = {
    "clip": "a vision or audio projector: it is loaded next to a language model, not instead of one",
    "wavtokenizer-dec": "an audio decoder, not a language model",
    "qwen3tts": "a speech model, not a language model",
    "pockettts": "a speech model, not a language model",
    "dream": "a diffusion language model, which no step-by-step generation can drive",
    "llada": "a diffusion language model, which no step-by-step generation can drive",
    "llada-moe": "a diffusion language model, which no step-by-step generation can drive",
    "rnd1": "a diffusion language model, which no step-by-step generation can drive",
    "eagle3": "a draft head, which needs the model it was made for",
    "dflash": "a draft head, which needs the model it was made for",
    "gemma4-assistant": "a draft head, which needs the model it was made for",
}


def model_class(architecture: str, *, file: str) -> ModelClass:
    """The class of an architecture.

    Raises:
        UnsupportedError: it is no language model, or one that this build does not know.
    """
    for names, found in _CLASSES:
        if architecture in names:
            return found
    reason = _NEITHER.get(architecture, "an architecture this build does not know")
    raise UnsupportedError(
        f"{file}: neither decoder, encoder nor recurrent: {architecture[:64]!r} is {reason}",
        architecture=architecture[:64],
        path=file,
    )
