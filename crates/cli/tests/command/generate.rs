//! `generate`: the built-in model, checkpoints that `transformers` wrote, and replay.

use crate::common::{Files, Run, assert_greedy, assert_refusals, checkpoint, generate, run, run_logging, with, words};
use serde_json::Value;
use std::path::PathBuf;

/// Runs `generate` with more flags; returns its text.
fn text(flags: &str) -> Run {
    run(&words(&format!("generate {flags}")))
}

fn tokens(sequence: &Value) -> Vec<u64> {
    sequence["tokens"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap()).collect()
}

/// `tools/checkpoints/make.py` made the checkpoints and, by `transformers` in float32, the expected values.
#[test]
fn checkpoints_of_transformers_give_its_greedy_tokens_and_log_probabilities() {
    for name in ["llama", "qwen3", "gemma2"] {
        assert_greedy(&checkpoint(name), name);
    }
}

#[test]
fn a_seed_replays_in_every_batch_on_any_threads_and_by_every_pathwise_variant() {
    for filters in ["", "--top-p 0.95 --repetition-penalty 1.1"] {
        let seeded = |seed: &str, more: &str| {
            generate(&format!("--prompt Once~there~was --max-tokens 60 {filters} --seed {seed} {more}"))
        };
        let batch = seeded("5", "--num-sequences 4");
        assert_eq!(batch.len(), 4);
        for (sequence, seed) in batch.iter().zip(["5", "6", "7", "8"]) {
            assert_eq!(sequence["seed"].to_string(), seed);
            assert_eq!(&seeded(seed, "")[0], sequence, "alone");
        }
        assert_ne!(tokens(&batch[0]), tokens(&batch[1]));
        for more in ["--backend cpu::1", "--backend cpu::2", "--variant sharded:3"] {
            assert_eq!(seeded("5", &format!("--num-sequences 4 {more}")), batch, "{more:?}");
        }
    }
}

/// A folder with the built-in model, reduced to its first layers.
fn first_layers(files: &Files, layers: u32) -> String {
    let stories = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models/stories");
    for name in ["tokenizer.json", "model.safetensors"] {
        std::fs::copy(stories.join(name), files.path(name)).unwrap();
    }
    let config = std::fs::read_to_string(stories.join("config.json")).unwrap();
    let less = config.replace("\"num_hidden_layers\": 4", &format!("\"num_hidden_layers\": {layers}"));
    files.bytes("config.json", less.as_bytes());
    files.folder().to_str().unwrap().to_owned()
}

#[test]
fn a_draft_changes_no_text() {
    let flags =
        "--num-sequences 3 --seed 21 --max-tokens 90 --logprobs 1 --min-p 0.01 --frequency-penalty 0.2 --stop forgot";
    let alone = generate(flags);
    for (layers, ahead) in [(4, 4), (3, 1), (3, 5)] {
        let files = Files::new();
        let folder = first_layers(&files, layers);
        let mut rows = generate(&format!("{flags} --draft {folder} --draft-tokens {ahead} --report"));
        let report = rows.pop().unwrap()["report"].clone();
        assert_eq!(rows, alone, "{layers} layers, {ahead} ahead");
        let [proposed, hold] = ["drawn_ahead", "drawn_ahead_that_hold"].map(|key| report[key].as_u64().unwrap());
        let (least, most) = if layers == 4 { (proposed * 9 / 10, proposed) } else { (1, proposed - 1) };
        assert!(proposed > 20 && (least..=most).contains(&hold), "{layers} layers: {report}");
    }
    text(&format!("--draft {}", checkpoint("llama"))).assert_refused("different tokens");
    text("--draft-tokens 3").assert_refused("--draft");
}

#[test]
fn n_is_another_name_of_num_sequences() {
    let of = |flag| generate(&format!("{flag} 2 --max-tokens 3"));
    let sequences = of("--num-sequences");
    assert_eq!((sequences.len(), &of("-n"), &of("--n")), (2, &sequences, &sequences));
}

#[test]
fn generate_without_arguments_writes_a_story() {
    let run = text("");
    assert_eq!(run.code, 0, "{run:#?}");
    assert!(run.stdout.starts_with(char::is_uppercase) && run.stdout.contains(". "), "{}", run.stdout);
    assert!(run.stdout.split_whitespace().count() > 20, "{}", run.stdout);
}

#[test]
fn a_stop_ends_the_text_before_it() {
    let whole = &generate("--seed 3")[0];
    let text = whole["text"].as_str().unwrap();
    let at = text.find(". ").expect("two sentences");
    let cut = &generate("--seed 3 --stop never~there --stop .~")[0];
    assert_eq!((cut["text"].as_str().unwrap(), &cut["finish_reason"]), (&text[..at], &"stop".into()));
    let short = &generate("--seed 3 --max-tokens 7")[0];
    assert_eq!((tokens(short), &short["finish_reason"]), (tokens(whole)[..7].to_vec(), &"length".into()));
}

#[test]
fn a_text_cut_by_the_position_limit_is_a_warning() {
    let (llama, prompt) = (checkpoint("llama"), "a".repeat(501)); // as many tokens, where the model has 512 positions
    let base = words(&format!("generate --model {} --prompt {prompt} --format json --min-tokens 11", llama));
    let of = |max| run_logging("warn", &with(&base, &format!("--max-tokens {max}")));
    let (whole, cut) = (of(11), of(12));
    assert_eq!((whole.code, whole.stderr.as_str(), cut.code), (0, "", 0), "{whole:#?}");
    assert!(whole.stdout == cut.stdout && tokens(&cut.rows()[0]).len() == 11);
    assert_eq!(cut.rows()[0]["finish_reason"], "length");
    let says = "1 of 1 sequence ended before --max-tokens: the model has 512 positions";
    assert!(cut.stderr.contains(says), "{cut:#?}");
}

#[test]
fn text_and_json_say_the_same() {
    let json = &generate("--seed 9 --prompt Long~ago")[0];
    let text = text("--seed 9 --prompt Long~ago");
    assert_eq!(text.stdout, format!("Long ago{}\n", json["text"].as_str().unwrap()));
}

#[test]
fn a_report_of_one_token_is_singular() {
    let run = text("--max-tokens 1 --top-p 0.9 --report");
    assert!(run.stdout.contains("prompt: 1 token in ") && run.stdout.contains("output: 1 token, "), "{run:#?}");
}

#[test]
fn log_probabilities_stand_beside_pieces_of_the_text() {
    let listing = text("--prompt Long~ago --max-tokens 12 --logprobs 1");
    let (text, listed) = listing.stdout.split_once('\n').unwrap();
    let (heading, listed) = listed.split_once('\n').unwrap();
    assert_eq!(heading, "    logprob drawn token, then logprob and token of the most probable");
    let piece = |line: &str, quote: usize| -> String {
        serde_json::from_str(&format!("\"{}\"", line.split('"').nth(quote).unwrap())).unwrap()
    };
    let pieces = |quote: usize| -> Vec<String> { listed.lines().map(|line| piece(line, quote)).collect() };
    assert_eq!(format!("Long ago{}", pieces(1).concat()), text, "{listing:#?}");
    assert!(pieces(3).iter().any(|piece| piece.starts_with(' ')), "{listing:#?}");
}

#[test]
fn knobs_reach_the_draw() {
    let banned = &generate("--max-tokens 40 --logit-bias 0:-inf --min-tokens 40")[0];
    assert_eq!(tokens(banned).len(), 40);
    let greedy = generate("--temperature 0 --seed 1");
    assert_eq!(tokens(&greedy[0]), tokens(&generate("--top-k 1 --seed 2")[0]));
    let penalised = generate("--temperature 0 --presence-penalty 1.5");
    assert_ne!(tokens(&greedy[0]), tokens(&penalised[0]));
    let rows = generate("--max-tokens 5 --report");
    assert_eq!(rows[1]["report"]["tokens"], 5);
}

#[test]
fn bad_input_is_one_clear_line() {
    assert_refusals(
        &words("generate"),
        "
        --model /nowhere => /nowhere: there is no such directory
        --max-tokens 0 => --max-tokens
        --num-sequences 0 => --num-sequences
        --num-sequences 2 --format json --top-p 1.5 => --top-p is 1.5
        --seed 18446744073709551615 --num-sequences 2 => 2^64
        --logprobs 1000000 => --logprobs
        --logit-bias 1681:1 => --logit-bias
        Once~upon~a~time => unexpected argument 'Once upon a time' found; the flag of a prompt is --prompt <TEXT>; 
        --num-sequence 3 => a similar argument exists: '--num-sequences'
        --backend cpu::0 => --backend: 0 threads",
    );
    run(&["generate", "--stop", ""]).assert_refused("--stop");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    text(&format!("--model {file}")).assert_refused("Cargo.toml: it is neither a directory nor a GGUF file");

    let files = Files::new();
    let refused = |changed: &str, bytes: Option<&[u8]>, says: &str| {
        for name in ["config.json", "tokenizer.json", "model.safetensors"] {
            std::fs::copy(checkpoint(&format!("llama/{name}")), files.path(name)).unwrap();
        }
        match bytes {
            Some(bytes) => drop(files.bytes(changed, bytes)),
            None => std::fs::remove_file(files.path(changed)).unwrap(),
        }
        text(&format!("--model {}", files.folder().display())).assert_refused(says);
    };
    for (name, bytes, says) in [
        ("config.json", None, "config.json: there is no such file"),
        ("config.json", Some(&b"{"[..]), "config.json"),
        ("tokenizer.json", None, "tokenizer.json: there is no such file"),
        ("tokenizer.json", Some(b"{}"), "tokenizer.json"),
        ("model.safetensors", None, "model.safetensors"),
        ("model.safetensors", Some(b"12345678"), "model.safetensors"),
    ] {
        refused(name, bytes, says);
    }
    let config = std::fs::read_to_string(checkpoint("llama/config.json")).unwrap();
    for (from, to, says) in [
        ("\"llama\"", "\"gpt2\"", "model_type is \"gpt2\""),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", "model.layers.2."),
        ("\"intermediate_size\": 64", "\"intermediate_size\": 65", "[65, 32]"),
        ("\"rope_parameters\": {", "\"rope_theta\": 7, \"rope_parameters\": {", "rope_theta is 7 at the top, but"),
        ("\"rope_parameters\": {", "\"rope_parameters\": [], \"unused\": {", "rope_parameters is []"),
        ("eos_token_id\": 256", "eos_token_id\": 999", ": config.json: eos_token_id names token 999"),
    ] {
        assert!(config.contains(from));
        refused("config.json", Some(config.replace(from, to).as_bytes()), says);
    }
    let eos = br#"{"eos_token_id": [256, 300]}"#;
    let says = ": generation_config.json: eos_token_id names token 300, but the vocabulary has size 257";
    refused("generation_config.json", Some(eos), says);
    let prompt = "a".repeat(512);
    text(&format!("--model {} --prompt {prompt}", checkpoint("llama"))).assert_refused("513 tokens");
}

#[test]
fn a_file_of_parameters_gives_what_its_flags_give() {
    let files = Files::new();
    let of_flags = |flags: &str| generate(&format!("--prompt Once~there~was --max-tokens 40 {flags}"));
    let of_file =
        |json: &str, more: &str| of_flags(&format!("--params {} {more}", files.bytes("p.json", json.as_bytes())));
    let json = r#"{"temperature": 0.9, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "dry_multiplier": 0.5,
        "min_tokens": 30, "logprobs": 2, "logit_bias": {"11": -2.5}}"#;
    let flags = "--temperature 0.9 --top-p 0.9 --top-k 40 --repetition-penalty 1.2 --dry-multiplier 0.5 --min-tokens 30 \
                 --logprobs 2 --logit-bias 11:-2.5";
    let several = "--seed 3 --num-sequences 3";
    let found = of_file(json, several);
    assert_eq!(found, of_flags(&format!("{flags} {several}")));
    assert_eq!(found[0]["logprobs"].as_array().unwrap().len(), tokens(&found[0]).len());
    // One object per sequence: each equals its own run, and only the first has log-probabilities.
    let found = of_file(r#"[{"temperature": 0.5, "logprobs": 0}, {"seed": 77, "top_p": 0.5}]"#, "--num-sequences 2");
    assert_eq!(found[0], of_flags("--temperature 0.5 --logprobs 0")[0]);
    assert_eq!(found[1], of_flags("--temperature 1 --seed 77 --top-p 0.5")[0]);
    assert!(found[1]["logprobs"].is_null());
    let all = of_file(r#"{"temperature": 0.5, "logprobs": -1, "seed": -1}"#, "");
    assert_eq!(all, of_flags("--temperature 0.5 --logprobs -1 --seed -1"));
    assert_eq!(all, of_flags("--temperature 0.5 --logprobs 1681"));
    let raw = of_file(r#"{"temperature": 0.3, "logprobs": 1, "logprobs_mode": "raw_logprobs"}"#, "");
    let of_raw = |mode| of_flags(&format!("--temperature 0.3 --logprobs 1 --logprobs-mode {mode}"));
    assert_eq!(raw, of_raw("raw"));
    assert_eq!(tokens(&raw[0]), tokens(&of_raw("processed")[0]));
    assert_ne!(raw[0]["logprobs"], of_raw("processed")[0]["logprobs"]);
    // A banned token is not drawn, and a stop token is not written.
    let whole = of_file(r#"{"temperature": 0}"#, "");
    let all = tokens(&whole[0]);
    let listed = |field: &str, more: &str, dry: &str| {
        let of_file = of_file(&format!(r#"{{"temperature": 0, "{field}": [{}]{more}}}"#, all[5]), "");
        let flag = field.replace('_', "-");
        assert_eq!(of_file, of_flags(&format!("--temperature 0 --{flag} {} {dry}", all[5])), "{field}");
        of_file[0].clone()
    };
    let stopped = listed("stop_token_ids", "", "");
    let at = all.iter().position(|token| *token == all[5]).unwrap();
    assert_eq!((stopped["finish_reason"].as_str(), tokens(&stopped)), (Some("stop"), all[..=at].to_vec()));
    let text = stopped["text"].as_str().unwrap();
    assert!(!text.is_empty() && whole[0]["text"].as_str().unwrap().starts_with(text) && whole[0]["text"] != text);
    assert!(!tokens(&listed("banned_token_ids", "", "")).contains(&all[5]));
    let only = of_file(r#"{"allowed_token_ids": [7, 8, 300]}"#, "");
    assert_eq!(only, of_flags("--temperature 1 --allowed-token-ids 7,8,300"));
    assert!(tokens(&only[0]).iter().all(|token| [7, 8, 300].contains(token)) && tokens(&only[0]).len() == 40);
    listed("dry_sequence_breakers", r#", "dry_multiplier": 4"#, "--dry-multiplier 4");
}

#[test]
fn bad_parameters_are_one_clear_line() {
    let files = Files::new();
    for (json, says) in [
        (r#"{"n": 2}"#, "--num-sequences"),
        (r#"{"output_token_ids": [1]}"#, "not supported by generate"),
        (r#"{"stop_token_ids": [5000]}"#, "5000"),
        (r#"{"temprature": 1}"#, "temprature"),
        (r#"{"temperature": "hot"}"#, "temperature: invalid type"),
        (r#"{"max_tokens": 5}"#, "max_tokens is set by --max-tokens"),
        (r#"{"stop": ["."]}"#, "stop is set by --stop"),
        (r#"[{}, {}]"#, "it has 2 objects for 1 sequence (--num-sequences); one object without an array serves every"),
    ] {
        let file = files.bytes("wrong.json", json.as_bytes());
        text(&format!("--params {file}")).assert_refused(says);
    }
    let seeded = files.bytes("seeded.json", br#"{"seed": 3}"#);
    text(&format!("--params {seeded} --seed 4")).assert_refused("--seed has no effect");
    text(&format!("--params {seeded} --num-sequences 2")).assert_refused("sequences 0 and 1 are equal");
    assert_refusals(
        &words("generate"),
        "
        --params p.json --top-k 5 => cannot be used with
        --allowed-token-ids 7,5000 => --allowed-token-ids names token 5000
        --logprobs-mode raw => --logprobs
        --banned-token-ids 5000 => --banned-token-ids names token 5000
        --stop-token-ids 5000 => --stop-token-ids names token 5000",
    );
}
