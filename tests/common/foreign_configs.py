"""Configuration files as people write them for other trainers, with those tools' own keys."""

from __future__ import annotations

LLAMA_FACTORY = """
### model
model_name_or_path: {model}
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all

### dataset
dataset: alpaca_en_demo
dataset_dir: {folder}
template: deepseek
cutoff_len: 256
max_samples: 60
overwrite_cache: true
preprocessing_num_workers: 1

### output
output_dir: {folder}/out
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true

### train
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1.0e-4
num_train_epochs: 3.0
max_steps: 3
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
packing: true

### eval
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 0.6
"""

AXOLOTL = """
base_model: {model}
load_in_8bit: true
load_in_4bit: false
strict: false
datasets:
  - path: {data}
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: {folder}/out
adapter: lora
sequence_len: 256
sample_packing: true
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
wandb_entity:
gradient_accumulation_steps: 2
micro_batch_size: 4
num_epochs: 1
max_steps: 2
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
warmup_steps: 1
evals_per_epoch: 4
weight_decay: 0.0
special_tokens:
  pad_token: <pad>
"""

ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""

TRAINING_ARGUMENTS = """
{"output_dir": "out", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
 "num_train_epochs": 2, "learning_rate": 5e-05, "lr_scheduler_type": "linear", "fp16": true,
 "bf16": false, "adam_beta2": 0.999, "seed": 42, "fsdp": "", "report_to": ["wandb"],
 "torch_compile": false, "warmup_ratio": 0.03, "group_by_length": true}
"""
