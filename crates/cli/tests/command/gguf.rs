//! GGUF files as the model of `generate` and as the head of `sample`.

use crate::common::{Files, assert_greedy, assert_same_sequence, f32_bytes, generate, run, run_logging, values, words};
use crate::gguf_files::{F32, GgufBuilder, fixture, random_matrix};
use flash_sampling::DType;
use flash_sampling_models::gguf::Value;

/// The content of a fixture. Python's `gguf` writes no empty list, which is what a tokenizer of bytes has as merges.
fn read(name: &str) -> GgufBuilder {
    let file = GgufBuilder::of(&std::fs::read(fixture(name)).unwrap());
    if name == "stories.gguf" { file } else { file.texts::<&str>("tokenizer.ggml.merges", &[]) }
}

/// The expected values are from `transformers` on the checkpoint of which `tools/checkpoints/gguf_file.py` made the file:
/// rows of queries and keys have llama.cpp's order, and Llama 3's rotary scaling is a tensor.
#[test]
fn gguf_files_give_the_greedy_tokens_of_transformers() {
    let files = Files::new();
    for name in ["llama", "qwen3"] {
        let model = files.bytes("model.gguf", &read(&format!("{name}.gguf")).build());
        assert_greedy(&model, name);
    }
}

#[test]
fn the_order_of_query_and_key_rows_belongs_to_the_architecture() {
    let (files, mut file) = (Files::new(), read("llama.gguf"));
    let flags = "--temperature 0 --max-tokens 24 --prompt a~b~c~d~e~f~g";
    let whole = generate(&format!("--model {} {flags}", files.bytes("whole.gguf", &file.build())));
    // In Hugging Face's order, heads of width 8 have the first elements of all pairs before the second elements.
    let hugging_face = |row: usize| row / 8 * 8 + row % 4 * 2 + row % 8 / 4;
    for part in ["attn_q.weight", "attn_q.bias", "attn_k.weight", "attn_k.bias"] {
        file = file.reordered(&format!("blk.0.{part}"), hugging_face).reordered(&format!("blk.1.{part}"), hugging_face);
    }
    let changed = generate(&format!("--model {} {flags}", files.bytes("changed.gguf", &file.build())));
    assert_ne!(changed[0]["tokens"], whole[0]["tokens"]);
    assert_eq!(changed[0]["prompt_tokens"], whole[0]["prompt_tokens"]);
}

#[test]
fn a_quantised_model_gives_the_greedy_tokens_of_its_float32_expansion() {
    let files = Files::new();
    let stories = fixture("stories.gguf");
    let expanded = files.bytes("f32.gguf", &read("stories.gguf").expanded().build());
    for prompt in ["Once~there~was", "Long~ago,~a~fox", ""] {
        let flags = format!("--temperature 0 --max-tokens 60 --prompt={prompt}");
        let [found, wide] = [&stories, &expanded].map(|model| generate(&format!("--model {model} {flags}")));
        assert_eq!(found[0]["tokens"], wide[0]["tokens"], "{prompt}");
        let batch = generate(&format!("--model {stories} {flags} -n 3"));
        assert!(batch.iter().all(|sequence| sequence["tokens"] == wide[0]["tokens"]), "{prompt}");
    }
    // A batch of different sequences, each as in a run of its own; and with a draft in another type.
    let flags = format!("--model {stories} --max-tokens 40 --top-p 0.95 --prompt Once~there~was");
    let batch = generate(&format!("{flags} --seed 5 -n 4"));
    for (sequence, seed) in batch.iter().zip(5..) {
        assert_eq!(&generate(&format!("{flags} --seed {seed}"))[0], sequence);
    }
    assert_ne!(batch[0]["tokens"], batch[1]["tokens"]);
    assert_eq!(generate(&format!("{flags} --seed 5 -n 4 --draft {expanded}")), batch);
}

/// A qwen3 of random weights, one type for each matrix of a layer, with a tokenizer of bytes.
fn every_type() -> GgufBuilder {
    let (hidden, wide, heads, kv_heads, dim) = (256, 512, 4, 2, 64);
    let mut file = read("qwen3.gguf");
    for layer in 0..2 {
        for part in ["attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"] {
            let width = if part.ends_with("_norm") && part.len() > 9 { dim } else { hidden };
            let norm: Vec<f32> = values(width, layer).iter().map(|x| 1.0 + x / 4.0).collect();
            file = file.tensor(&format!("blk.{layer}.{part}.weight"), &[width], F32, f32_bytes(&norm));
        }
        let types = match layer {
            0 => [DType::Q6_K, DType::Q4_K, DType::Q5_K, DType::Q8_0, DType::IQ4_NL, DType::MXFP4, DType::Q4_0],
            _ => [DType::MXFP4, DType::IQ4_NL, DType::F16, DType::Q6_K, DType::Q4_K, DType::BF16, DType::Q5_K],
        };
        let shapes = [
            ("attn_q", heads * dim, hidden),
            ("attn_k", kv_heads * dim, hidden),
            ("attn_v", kv_heads * dim, hidden),
            ("attn_output", hidden, heads * dim),
            ("ffn_gate", wide, hidden),
            ("ffn_up", wide, hidden),
            ("ffn_down", hidden, wide),
        ];
        for (at, ((part, rows, cols), dtype)) in shapes.into_iter().zip(types).enumerate() {
            let (kind, bytes) = random_matrix(dtype, rows, cols, 0.09, (layer * 16 + at) as u64);
            file = file.tensor(&format!("blk.{layer}.{part}.weight"), &[rows, cols], kind, bytes);
        }
    }
    let norm: Vec<f32> = values(hidden, 9).iter().map(|x| 1.0 + x / 4.0).collect();
    let (embedding_kind, embedding) = random_matrix(DType::Q8_0, 257, hidden, 1.0, 90);
    let (head_kind, head) = random_matrix(DType::Q6_K, 257, hidden, 0.3, 91);
    file.tensor("output_norm.weight", &[hidden], F32, f32_bytes(&norm))
        .tensor("token_embd.weight", &[257, hidden], embedding_kind, embedding)
        .tensor("output.weight", &[257, hidden], head_kind, head)
        .uint("qwen3.embedding_length", hidden as u32)
        .uint("qwen3.feed_forward_length", wide as u32)
        .uint("qwen3.attention.head_count", heads as u32)
        .uint("qwen3.attention.head_count_kv", kv_heads as u32)
        .uint("qwen3.attention.key_length", dim as u32)
        .uint("qwen3.attention.value_length", dim as u32)
        .uint("qwen3.rope.dimension_count", dim as u32)
}

#[test]
fn every_type_of_block_gives_the_tokens_of_its_float32_expansion() {
    let (files, file) = (Files::new(), every_type());
    let blocks = files.bytes("blocks.gguf", &file.build());
    let expanded = files.bytes("f32.gguf", &file.expanded().build());
    for prompt in ["a", "The~naive~fox", "0123456789"] {
        let flags = format!("--temperature 0 --max-tokens 20 --logprobs 1 --prompt {prompt}");
        let [found, wide] = [&blocks, &expanded].map(|model| generate(&format!("--model {model} {flags}")));
        assert_same_sequence(&found[0], &wide[0], 2e-3, prompt);
    }
}

/// Draws by `sample --canonical` from hidden states of 128 columns.
fn draw(files: &Files, flags: &str) -> Vec<Vec<u64>> {
    let hidden = files.npy("h.npy", &[3, 128], &values(3 * 128, 9));
    run(&words(&format!("sample --format json --canonical --draws 20 --hidden {hidden} {flags}"))).tokens()
}

#[test]
fn sample_takes_the_head_of_a_gguf_file() {
    let files = Files::new();
    let (stories, file) = (fixture("stories.gguf"), read("stories.gguf"));
    // A canonical plan draws the same token from the same real weights in any type.
    let expected = draw(&files, &format!("--weight {}", files.bytes("f32.gguf", &file.expanded().build())));
    assert_eq!(draw(&files, &format!("--weight {stories}")), expected);
    assert_eq!(draw(&files, &format!("--weight {stories}:token_embd.weight")), expected);
    assert_eq!(draw(&files, &format!("--model {stories}")), expected);
    // An own head comes before the embedding.
    let (kind, bytes) = random_matrix(DType::Q4_0, 500, 128, 0.1, 3);
    let both = files.bytes("both.gguf", &file.clone().tensor("output.weight", &[500, 128], kind, bytes).build());
    let own = draw(&files, &format!("--weight {both}:output.weight"));
    assert_ne!(own, expected);
    assert_eq!(
        (draw(&files, &format!("--weight {both}")), draw(&files, &format!("--model {both}"))),
        (own.clone(), own)
    );
    // Other architectures have a head too, with transforms of the logits.
    let of = |architecture: &str, key: &str, value: f32| {
        let file =
            file.clone().text("general.architecture", architecture).float(&format!("{architecture}.{key}"), value);
        files.bytes("head.gguf", &file.build())
    };
    let capped = draw(&files, &format!("--weight {stories} --soft-cap 2.5"));
    assert_eq!(draw(&files, &format!("--model {}", of("gemma2", "final_logit_softcapping", 2.5))), capped);
    let scaled = draw(&files, &format!("--weight {stories} --scale 0.25"));
    assert_eq!(draw(&files, &format!("--model {}", of("command-r", "logit_scale", 0.25))), scaled);
    assert_eq!(draw(&files, &format!("--model {}", of("granite", "logit_scale", 4.0))), scaled);
    // The bias makes every token but 7 impossible.
    let bias: Vec<u8> = (0..1681).flat_map(|token| if token == 7 { 1e4f32 } else { 0.0 }.to_le_bytes()).collect();
    let biased = files.bytes("bias.gguf", &file.clone().tensor("output.bias", &[1681], F32, bias).build());
    assert_eq!(draw(&files, &format!("--model {biased}")), vec![vec![7; 20]; 3]);
    let hidden = files.name("h.npy");
    let refused = |flags: &str, says: &str| {
        run(&words(&format!("sample --hidden {hidden} {flags}"))).assert_refused(says);
    };
    let unclear = of("other", "logit_scale", 4.0);
    refused(
        &format!("--model {unclear}"),
        "the value of logit_scale in GGUF is not a number or is ambiguous; give --scale",
    );
    assert_eq!(draw(&files, &format!("--model {unclear} --scale 0.25")), scaled);
    refused(&format!("--weight {stories}:nothing"), "no tensor \"nothing\"; it has ");
    refused(
        &format!("--weight {stories}:output_norm.weight"),
        "output_norm.weight has shape [128], expected [vocab, hidden]",
    );
    let says = "token_embd.weight has dtype q8_0, expected bf16, f16 or f32";
    let args = words(&format!("sample --weight {stories} --hidden {stories}:token_embd.weight"));
    run(&args).assert_refused(says);
    let states = file.clone().tensor("h", &[3, 128], F32, f32_bytes(&values(3 * 128, 9)));
    let states = files.bytes("states.gguf", &states.build());
    let args = format!("sample --format json --canonical --draws 20 --weight {stories} --hidden {states}:h");
    assert_eq!(run(&words(&args)).tokens(), expected);
    let headless = files.bytes("no.gguf", &file.without("token_embd.weight").build());
    refused(&format!("--model {headless}"), "there is no tensor output.weight and no tensor token_embd.weight");
    refused(&format!("--weight {headless}"), "which tensor? Name one as FILE:TENSOR; it has 37: blk.0.attn_k.weight, ");
}

#[test]
fn what_a_gguf_file_says_of_the_head_is_logged() {
    let files = Files::new();
    let padded = read("stories.gguf").uint("llama.vocab_size", 1000).float("llama.final_logit_softcapping", 30.0);
    let (model, hidden) = (files.bytes("m.gguf", &padded.build()), files.npy("h.npy", &[1, 128], &values(128, 9)));
    let logged = run_logging("info", &["sample", "--model", &model, "--hidden", &hidden]).stderr;
    for says in [
        "the head is token_embd.weight of",
        "GGUF: vocab_size 1000; the weight has 681 rows of padding",
        "softcapping 30",
    ] {
        assert!(logged.contains(says), "{says}: {logged}");
    }
}

#[test]
fn bad_gguf_files_are_one_clear_line() {
    let files = Files::new();
    let refused = |bytes: &[u8], says: &str| {
        run(&["generate", "--model", &files.bytes("bad.gguf", bytes)]).assert_refused(says);
    };
    let whole = std::fs::read(fixture("llama.gguf")).unwrap();
    refused(b"GGML", "bad.gguf: it is neither a directory nor a GGUF file");
    refused(b"GGUF", "bad.gguf: not a usable GGUF file: it is truncated or damaged: the header needs 4 more bytes");
    let changed = |at: usize, bytes: &[u8]| [&whole[..at], bytes, &whole[at + bytes.len()..]].concat();
    refused(&changed(4, &[9, 0, 0, 0]), "it has version 9; versions 2 and 3 are supported");
    refused(&changed(4, &[0, 0, 0, 3]), "it is big-endian; only little-endian files are supported");
    refused(&changed(8, &[0xff; 8]), "tensor ");
    refused(&changed(16, &[0xff; 8]), "of 18446744073709551615");
    refused(&whole[..200], "needs");
    refused(&whole[..whole.len() - 40], "the tensor ");
    let file = read("llama.gguf");
    let (name, shape) = ("blk.1.ffn_up.weight", [64, 32]);
    let with = |shape: &[usize], kind, bytes: usize| file.clone().tensor(name, shape, kind, vec![0; bytes]);
    for (changed, says) in [
        (file.clone().without("llama.block_count"), "the key llama.block_count is missing"),
        (file.clone().without("tokenizer.ggml.tokens"), "the key tokenizer.ggml.tokens is missing"),
        (file.clone().without(name), "there is no tensor blk.1.ffn_up.weight"),
        (file.clone().without("blk.1.attn_q.bias"), "there is no tensor blk.1.attn_q.bias"),
        (
            file.clone().text("general.architecture", "gemma2"),
            "bad.gguf: the key general.architecture is \"gemma2\", expected llama or qwen3",
        ),
        (file.clone().uint("llama.expert_count", 4), "the key llama.expert_count is 4, which is not supported"),
        (file.clone().uint("llama.block_count", 3), "there is no tensor blk.2.attn_norm.weight"),
        (
            file.clone().uint("llama.block_count", 1),
            "the tensor blk.1.attn_k.bias is not part of the architecture llama",
        ),
        (
            file.clone().tensor("blk.0.attn_q_norm.weight", &[8], F32, vec![0; 32]),
            "is not part of the architecture llama",
        ),
        (with(&[32, 32], F32, 4096), "blk.1.ffn_up.weight has shape [32, 32], but the configuration makes it [64, 32]"),
        (with(&shape, F32, 8000), "the tensor blk.1.ffn_up.weight needs 8192 more bytes, but the file has 8000"),
        (with(&[64, 31], 8, 4096), "the tensor blk.1.ffn_up.weight has 31 columns, no whole number of blocks of 32"),
        (with(&shape, 10, 4096), "the tensor blk.1.ffn_up.weight has type Q2_K, which is not supported"),
        (with(&shape, 777, 4096), "the tensor blk.1.ffn_up.weight has type number 777"),
        (file.clone().uint("tokenizer.ggml.eos_token_id", 999), "names token 999, but the vocabulary has size 257"),
        (file.clone().uint("general.alignment", 0), "the key general.alignment is 0, expected a power of two"),
        (file.clone().key("general.alignment", Value::Unsigned(1 << 12)), "not a multiple of 4096"),
    ] {
        refused(&changed.build(), says);
    }
}
