//! `--model`: checkpoint folders, single and sharded, tied and not, and the effect of config.json.

use crate::common::{Files, Run, bf16_bytes, run, run_logging, values, words};
use safetensors::tensor::Dtype;

const SHAPE: [usize; 2] = [64, 16];

fn tensor(seed: usize) -> Vec<u8> {
    bf16_bytes(&values(64 * 16, seed))
}

/// Draws from hidden states and the head that `flags` name.
fn draw(files: &Files, flags: &str) -> Run {
    let hidden = files.npy("h.npy", &[2, 16], &values(32, 9));
    run(&words(&format!("sample --format json --draws 30 --hidden {hidden} {flags}")))
}

/// Draws from the folder itself.
fn sample(files: &Files, more: &str) -> Run {
    draw(files, &format!("--model {} {more}", files.folder().display()))
}

/// The draws from one tensor, for comparison.
fn expected(seed: usize, more: &str) -> Vec<Vec<u64>> {
    let files = Files::new();
    let weight = files.safetensors("w.safetensors", &[("w", Dtype::BF16, &SHAPE, tensor(seed))]);
    draw(&files, &format!("--weight {weight} {more}")).tokens()
}

fn both(files: &Files) {
    files.safetensors(
        "model.safetensors",
        &[
            ("model.embed_tokens.weight", Dtype::BF16, &SHAPE, tensor(1)),
            ("lm_head.weight", Dtype::BF16, &SHAPE, tensor(2)),
        ],
    );
}

fn embedding_only(files: &Files) {
    files.safetensors("model.safetensors", &[("model.embed_tokens.weight", Dtype::BF16, &SHAPE, tensor(1))]);
}

#[test]
fn config_decides_between_head_and_tied_embedding() {
    let files = Files::new();
    both(&files);
    assert_eq!(sample(&files, "").tokens(), expected(2, ""));
    files.bytes("config.json", br#"{"tie_word_embeddings": false}"#);
    assert_eq!(sample(&files, "").tokens(), expected(2, ""));
    files.bytes("config.json", br#"{"tie_word_embeddings": true}"#);
    assert_eq!(sample(&files, "").tokens(), expected(1, ""));
    embedding_only(&files);
    assert_eq!(sample(&files, "").tokens(), expected(1, ""));
    files.bytes("config.json", br#"{}"#);
    assert_eq!(sample(&files, "").tokens(), expected(1, ""));
    files.bytes("config.json", br#"{"tie_word_embeddings": false}"#);
    sample(&files, "").assert_refused("the embedding is not tied");
}

#[test]
fn shards_are_found_through_the_index() {
    let files = Files::new();
    files.safetensors("a.safetensors", &[("model.embed_tokens.weight", Dtype::BF16, &SHAPE, tensor(1))]);
    files.safetensors("b.safetensors", &[("lm_head.weight", Dtype::BF16, &SHAPE, tensor(2))]);
    let index = |head: &str| {
        format!(r#"{{"weight_map": {{"model.embed_tokens.weight": "a.safetensors", "lm_head.weight": "{head}"}}}}"#)
    };
    let set = |text: &str| files.bytes("model.safetensors.index.json", text.as_bytes());
    set(&index("b.safetensors"));
    assert_eq!(sample(&files, "").tokens(), expected(2, ""));
    set(&index("a.safetensors"));
    sample(&files, "").assert_refused("a.safetensors: no tensor \"lm_head.weight\"");
    set(&index("c.safetensors"));
    sample(&files, "").assert_refused("c.safetensors: No such file");
    set(&index("../b.safetensors"));
    sample(&files, "").assert_refused("is not the name of a file in the same folder");
    set("{");
    sample(&files, "").assert_refused("model.safetensors.index.json: not a valid safetensors index");
}

#[test]
fn a_folder_without_a_model_is_refused() {
    let files = Files::new();
    sample(&files, "").assert_refused("the directory has neither model.safetensors nor model.safetensors.index.json");
    files.safetensors("model.safetensors", &[("x", Dtype::BF16, &SHAPE, tensor(1))]);
    sample(&files, "").assert_refused("no tensor lm_head.weight");
    files.bytes("config.json", b"[]");
    sample(&files, "").assert_refused("config.json");
}

#[test]
fn what_config_says_of_the_logits_is_done() {
    let files = Files::new();
    both(&files);
    files.bytes("config.json", br#"{"vocab_size": 50, "final_logit_softcapping": 2.5}"#);
    assert_eq!(sample(&files, "").tokens(), expected(2, "--vocab-size 50 --soft-cap 2.5"));
    let flags = "--vocab-size 60 --soft-cap 9";
    assert_eq!(sample(&files, flags).tokens(), expected(2, flags));
    files.bytes("config.json", br#"{"logits_scaling": 4, "vocab_size": 64}"#);
    assert_eq!(sample(&files, "").tokens(), expected(2, "--scale 0.25"));
    files.bytes("config.json", br#"{"logit_scale": "inv_sqrt_d_model"}"#);
    sample(&files, "").assert_refused("give --scale");
    assert_eq!(sample(&files, "--scale 2").tokens(), expected(2, "--scale 2"));
}

#[test]
fn what_config_changed_is_said() {
    let files = Files::new();
    both(&files);
    files.bytes("config.json", br#"{"vocab_size": 50, "final_logit_softcapping": 30, "logit_scale": 0.5}"#);
    let hidden = files.npy("h.npy", &[2, 16], &values(32, 9));
    let result = run_logging("info", &["sample", "--model", files.folder().to_str().unwrap(), "--hidden", &hidden]);
    for says in ["lm_head.weight", "vocab_size 50", "softcapping 30", "multiplied by 0.5"] {
        assert!(result.stderr.contains(says), "{says}: {}", result.stderr);
    }
}

#[test]
fn a_bias_of_the_head_is_added() {
    let files = Files::new();
    let mut bias = vec![0.0; 64];
    bias[11] = 50.0;
    let write = |bias: &[f32]| {
        files.safetensors(
            "model.safetensors",
            &[
                ("lm_head.weight", Dtype::BF16, &SHAPE, tensor(2)),
                ("lm_head.bias", Dtype::BF16, &[bias.len()], bf16_bytes(bias)),
            ],
        )
    };
    write(&bias);
    assert!(sample(&files, "").tokens().iter().flatten().all(|token| *token == 11));
    write(&bias[..60]);
    sample(&files, "").assert_refused("the head's bias has 60 values, but its weight has 64 rows");
}
