//! `sample`: the same flags give the same output, with any variant, number of threads and split into portions.

use crate::common::{Files, f32_bytes, run, run_logging, small_head, values, with};
use safetensors::tensor::Dtype;

#[test]
fn a_row_of_json_has_the_promised_shape() {
    let (_files, head) = small_head();
    let rows = run(&with(&head, "--draws 5 --logprobs 3")).rows();
    assert_eq!(rows.len(), 3);
    for (r, row) in rows.iter().enumerate() {
        assert_eq!(row["row"], r);
        for list in ["tokens", "scores", "logprobs"] {
            assert_eq!(row[list].as_array().unwrap().len(), 5, "{list}");
        }
        let top = row["top"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        assert!(top.iter().all(|t| t["token"].is_u64() && t["logprob"].as_f64().unwrap() < 0.0));
        assert!(row["log_z"].as_f64().unwrap() > 5.0);
        assert_eq!(row.as_object().unwrap().len(), 6);
    }
    let plain = run(&head).rows();
    assert!(plain[0]["top"].as_array().unwrap().is_empty() && plain[0]["logprobs"][0].is_f64());
}

#[test]
fn the_same_flags_give_the_same_output() {
    let (_files, head) = small_head();
    let flags = with(&head, "--draws 50 --logprobs 2 --seed 9 --temperature 0.7");
    let first = run(&flags);
    assert_eq!(first.code, 0);
    assert_eq!(run(&flags).stdout, first.stdout);
    assert_eq!(run(&with(&flags, "--backend cpu::1")).stdout, first.stdout);
    assert_eq!(run(&with(&flags, "--backend cpu::3")).stdout, first.stdout);
    assert_ne!(run(&with(&head, "--draws 50 --logprobs 2 --seed 8 --temperature 0.7")).stdout, first.stdout);
}

#[test]
fn pathwise_variants_give_the_same_tokens() {
    let (_files, head) = small_head();
    let want = run(&with(&head, "--draws 200")).tokens();
    let pathwise = "sharded:4, sharded:1, sharded:7, sharded:1000, tiled --backend reference, tiled --canonical, \
        sharded:4 --canonical";
    for variant in pathwise.split(", ") {
        assert_eq!(run(&with(&head, &format!("--draws 200 --variant {variant}"))).tokens(), want, "{variant}");
    }
    let shadow = run(&with(&head, "--draws 200 --shadow"));
    assert_eq!(shadow.tokens(), want, "{}", shadow.stderr);
    for isa in flash_sampling::Isa::available() {
        assert_eq!(run(&with(&head, &format!("--draws 200 --backend cpu:{isa}"))).tokens(), want, "{isa}");
    }
    for variant in ["grouped:64", "online:64", "sharded:4:log-mass"] {
        let tokens = run(&with(&head, &format!("--draws 200 --variant {variant}"))).tokens();
        assert!(tokens.iter().all(|row| row.len() == 200 && row.iter().all(|t| *t < 300)), "{variant}");
        assert_ne!(tokens, want, "{variant}");
    }
}

#[test]
fn a_position_is_a_row_under_one_seed() {
    let (_files, head) = small_head();
    let rows = run(&with(&head, "--draws 20 --seed 5 --position 100")).tokens();
    for (r, row) in rows.iter().enumerate() {
        let seeds = run(&with(&head, &format!("--draws 20 --seeds 5,5,5 --position {}", 100 + r))).tokens();
        assert_eq!(seeds[r], *row);
    }
    let own = run(&with(&head, "--draws 20 --seeds 1,5,2 --position 101")).tokens();
    assert_eq!(own[1], rows[1]);
    assert_ne!(own[0], rows[0]);
}

#[test]
fn draws_made_in_portions_equal_draws_made_at_once() {
    let (_files, head) = small_head();
    let few = run(&with(&head, "--draws 1000")).tokens();
    // Several portions: a call makes at most 8192 draws over all rows.
    let many = run(&with(&head, "--draws 50000")).tokens();
    for (few, many) in few.iter().zip(&many) {
        assert_eq!(many.len(), 50_000);
        assert_eq!(*few, many[..1000]);
    }
    let later: Vec<_> = many[0][30_000..].to_vec();
    assert_ne!(later[..1000], many[0][..1000]);
}

#[test]
fn masks_and_biases_decide_what_is_drawn() {
    let (files, head) = small_head();
    let even = files.npy("even.npy", &[10], &[0x5555_5555u32; 10]);
    let tokens = run(&with(&head, &format!("--draws 300 --mask {even}"))).tokens();
    assert!(tokens.iter().flatten().all(|token| token % 2 == 0));
    let mut by_row = [[0i32; 10]; 3];
    (0..3).for_each(|r| by_row[r][r] = 1 << 4);
    let by_row = files.npy("rows.npy", &[3, 10], by_row.as_flattened());
    let tokens = run(&with(&head, &format!("--draws 2 --mask {by_row}"))).tokens();
    assert_eq!(tokens, [[4, 4], [36, 36], [68, 68]]);
    let tokens = run(&with(&head, "--draws 20 --logit-bias 299:100,7:-inf")).tokens();
    assert!(tokens.iter().flatten().all(|token| *token == 299));
    let tokens = run(&with(&head, "--draws 2000 --vocab-size 10")).tokens();
    assert!(tokens.iter().flatten().all(|token| *token < 10));
}

#[test]
fn every_pair_of_types_and_both_formats_are_read() {
    let files = Files::new();
    let (w, h) = (values(40 * 8, 1), values(2 * 8, 2));
    let half = |v: &[f32]| v.iter().map(|v| half::f16::from_f32(*v)).collect::<Vec<_>>();
    let half_bytes = |v: &[f32]| half(v).iter().flat_map(|h| h.to_le_bytes()).collect::<Vec<_>>();
    let of = |name: &str, rows: usize, v: &[f32]| {
        [
            files.safetensors(&format!("{name}32.st"), &[("x", Dtype::F32, &[rows, 8], f32_bytes(v))]),
            files
                .safetensors(&format!("{name}b16.st"), &[("x", Dtype::BF16, &[rows, 8], crate::common::bf16_bytes(v))])
                + ":x",
            files.safetensors(&format!("{name}f16.st"), &[("x", Dtype::F16, &[rows, 8], half_bytes(v))]),
            files.npy(&format!("{name}32.npy"), &[rows as u64, 8], v),
            files.npy(&format!("{name}16.npy"), &[rows as u64, 8], &half(v)),
        ]
    };
    let mut seen: Option<Vec<Vec<u64>>> = None;
    for weight in of("w", 40, &w) {
        for hidden in of("h", 2, &h) {
            let tokens =
                run(&["sample", "--format", "json", "--draws", "40", "--weight", &weight, "--hidden", &hidden])
                    .tokens();
            assert_eq!(*seen.get_or_insert(tokens.clone()), tokens, "{weight} x {hidden}");
        }
    }
    let one = files.npy("one.npy", &[8], &h[..8]);
    let weight = files.npy("w.npy", &[40, 8], &w);
    let one = run(&["sample", "--format", "json", "--draws", "40", "--weight", &weight, "--hidden", &one]).tokens();
    assert_eq!(one[0], seen.unwrap()[0]);
}

#[test]
fn the_built_in_head_says_so_and_draws() {
    let result = run_logging("info", &["sample", "--draws", "40"]);
    assert_eq!(result.code, 0);
    assert!(result.stderr.contains("a built-in head of 151936 tokens, hidden size 1024"), "{}", result.stderr);
    assert!(result.stdout.contains("row 3: log Z") && result.stdout.contains("probability"), "{}", result.stdout);
}
