"""Makes a small SentencePiece BPE with byte fallback, as the tokenizer of a GGUF file, and its tokens of some texts.

    pip install gguf sentencepiece
    python tools/checkpoints/sentence_piece.py crates/cli/tests/checkpoints/gguf

The training text is tools/stories/grammar.txt.
"""

import io
import json
import sys
from pathlib import Path

import gguf
import sentencepiece

TEXTS = [
    "", "Once there was a fox.", " two  spaces   and three", "tabs\tand\nlines\n\n", "naïve — 42 🦊 日本", "< s > is no token here",
    "once upon a time the little mouse was very happy and the old owl was not", "▁", "x" * 40, " ", "fox\u0000",
]


def main():
    out = Path(sys.argv[1])
    grammar = Path(__file__).parents[1] / "stories" / "grammar.txt"
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(grammar.read_text().splitlines()), model_writer=model, model_type="bpe", vocab_size=700,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True,
        character_coverage=0.999, minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    kinds = []
    for id in range(len(pieces)):
        checks = [(pieces.is_unknown, "UNKNOWN"), (pieces.is_control, "CONTROL"), (pieces.is_unused, "UNUSED"), (pieces.is_byte, "BYTE")]
        kinds.append(gguf.TokenType[next((kind for check, kind in checks if check(id)), "NORMAL")])
    writer = gguf.GGUFWriter(out / "sentence_piece.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([pieces.id_to_piece(id) for id in range(len(pieces))])
    writer.add_token_scores([pieces.get_score(id) for id in range(len(pieces))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())
    writer.add_unk_token_id(pieces.unk_id())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = [{"text": text, "tokens": pieces.encode(text)} for text in TEXTS]
    (out / "sentence_piece.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
