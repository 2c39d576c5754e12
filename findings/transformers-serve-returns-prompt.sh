#!/usr/bin/env bash
# transformers serve: answers of a Qwen2 model with another chat template than ChatML contain the prompt.
#
# Guess: the answer is what the model writes after the prompt, as for a Llama model.
# Seen: the server chooses a parser by model_type. That of qwen2 looks for ChatML's opening in the
# prompt. It isn't there, so the whole prompt becomes the content of the answer. If the prompt opens a
# thought, as that of DeepSeek-R1-Distill-Qwen, the text of the model is returned as the thought. A
# response_template in the tokenizer's config replaces the parser.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet torch==2.13.0 transformers==5.23.0 \
  tokenizers==0.23.3 accelerate==1.12.0 jinja2==3.1.6 openai==3.57.0 fastapi==0.165.0 \
  starlette==1.10.0 uvicorn==0.54.0 || exit 2
cat > "$folder/serve.py" <<'END'
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path

import openai
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.cli.serve import Serve

TEMPLATE = (
    "{% for m in messages %}{{ '<User>' if m.role == 'user' else '<Assistant>' }}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<Assistant>' }}{% endif %}"
)


def save(kind, folder):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=257, special_tokens=["<end>"], initial_alphabet=alphabet)
    bpe.train_from_iterator(["a"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": 0}
    config = CONFIG_MAPPING[kind](vocab_size=len(tokenizer), **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main(home):
    for name in ("torch", "transformers", "openai"):
        print(name, version(name))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Serve(host="127.0.0.1", port=port, device="cpu", log_level="error", non_blocking=True)
    for _ in range(600):
        if server.server.started:
            break
        time.sleep(0.1)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any")
    messages = [{"role": "user", "content": "How many apples?"}]
    has_prompt = {}
    for kind in ("llama", "qwen2"):
        save(kind, home / kind)
        answer = client.chat.completions.create(
            model=str(home / kind), messages=messages, max_tokens=4, temperature=0
        )
        content = answer.choices[0].message.content
        has_prompt[kind] = content.startswith("<User>How many apples?<Assistant>")
        print(f"{kind}: the answer begins with the prompt: {has_prompt[kind]}")
    server.kill_server()
    as_described = has_prompt == {"llama": False, "qwen2": True}
    print("as described" if as_described else "the behaviour has changed")
    return 0 if as_described else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
END
"$folder/venv/bin/python" "$folder/serve.py" "$folder" 2> "$folder/log" | grep -v -e INFO: -e "^$"
