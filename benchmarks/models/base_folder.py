"""Writes a Llama with random weights in bf16 to a folder, as transformers saves it.

python -m models.base_folder --folder FOLDER --hidden 2048 ...     (with the shape that workers/step.py takes)
"""

import torch
from transformers import AutoModelForCausalLM
from workers.step import make_configuration, make_parser


def main() -> None:
    parser = make_parser()
    parser.add_argument("--folder", required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(make_configuration(options), dtype=torch.bfloat16).save_pretrained(options.folder)


if __name__ == "__main__":
    main()
