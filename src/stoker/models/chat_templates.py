"""Chat templates of model families, for files that bring none; Jinja source as `stoker.chat` renders it.

A family is told by the token that ends a turn, or by its architecture where all of its models were trained
with one layout. A model of no known family has no template: a layout that it never saw gives noise.

Apart because it is a table that grows with the families.
"""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% set system = messages[0]['content'] | trim + '\\n\\n' if messages[0]['role'] == 'system' else '' %}"
    "{% for message in (messages[1:] if system else messages) %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n'"
    " + (system if loop.first else '') + (message['content'] or '') | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + (message['content'] or '') | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
PHI3 = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + (message['content'] or '') + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

_BY_END = {"<|im_end|>": CHATML, "<end_of_turn>": GEMMA, "<|eot_id|>": LLAMA3, "<|end|>": PHI3}
_BY_ARCHITECTURE = {"gemma": GEMMA, "qwen": CHATML, "phi3": PHI3}


def family_template(architecture: str, eos_text: str) -> str | None:
    """The template of the family that a model belongs to; None: of none that is known.

    Args:
        architecture: as its file names it, such as "gemma3".
        eos_text: the token that ends its text.
    """
    by_name = (text for family, text in _BY_ARCHITECTURE.items() if architecture.startswith(family))
    return _BY_END.get(eos_text) or next(by_name, None)
