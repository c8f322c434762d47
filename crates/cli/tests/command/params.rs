//! `sample --params`, and the flags that it replaces.

use crate::common::{assert_refusals, run, small_head, with};

#[test]
fn a_file_gives_what_its_flags_give() {
    let (files, head) = small_head();
    let same = |json: &str, flags: &str| {
        let file = files.bytes("p.json", json.as_bytes());
        let (of_file, of_flags) = (run(&with(&head, &format!("--params {file}"))), run(&with(&head, flags)));
        assert_eq!(of_file.code, 0, "{of_file:#?}");
        assert_eq!(of_file.stdout, of_flags.stdout, "{json}");
    };
    same("{}", "");
    same(r#"{"stop": [], "max_tokens": null, "detokenize": true, "ignore_eos": false, "top_k": 4}"#, "--top-k 4");
    same(
        r#"{"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "n": 7, "seed": 4, "logprobs": 3}"#,
        "--temperature 0.7 --top-k 50 --top-p 0.9 --min-p 0.01 --draws 7 --seed 4 --logprobs 3",
    );
    same(r#"{"top_k": -1, "n": 40, "without_replacement": true}"#, "--draws 40 --without-replacement");
    same(r#"{"top_k": 0, "n": 40}"#, "--top-k -1 --draws 40");
    same(r#"{"logit_bias": {"3": "-inf", "5": 2}, "n": 90}"#, "--logit-bias 3:-inf,5:2 --draws 90");
    same(
        r#"{"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25, "n": 30,
            "prompt_token_ids": [1, 2, 3], "output_token_ids": [7, 7, 9], "banned_token_ids": [4, 5],
            "min_tokens": 4, "stop_token_ids": [0, 8], "logit_bias": {"11": 2.5}}"#,
        "--repetition-penalty 1.5 --frequency-penalty 0.5 --presence-penalty 0.25 --draws 30 --prompt-tokens 1,2,3 \
         --output-tokens 7,7,9 --banned-token-ids 4,5 --min-tokens 4 --stop-token-ids 0,8 --logit-bias 11:2.5",
    );
    same(
        r#"{"dry_multiplier": 2.0, "dry_penalty_last_n": 3, "output_token_ids": [1, 2, 3, 4, 1, 2], "n": 50}"#,
        "--dry-multiplier 2 --dry-penalty-last-n 3 --output-tokens 1,2,3,4,1,2 --draws 50",
    );
    same(r#"{"allowed_token_ids": [4, 250], "n": 20}"#, "--allowed-token-ids 250,4 --draws 20");
    same(
        r#"{"dry_multiplier": 2.0, "output_token_ids": [1, 2, 3, 1, 2], "n": 50, "dry_sequence_breakers": [9, 8]}"#,
        "--dry-multiplier 2 --output-tokens 1,2,3,1,2 --draws 50 --dry-sequence-breakers 9,8",
    );
    same(
        r#"{"logprobs": 2, "logprobs_mode": "raw_logprobs", "temperature": 0.2, "n": 3000}"#,
        "--logprobs 2 --logprobs-mode raw --temperature 0.2 --draws 3000",
    );
    same(r#"{"logprobs": -1, "seed": -1, "stop_token_ids": null, "n": 3}"#, "--logprobs 300 --draws 3");
    same(r#"{"logprobs": -1, "seed": -1, "n": 3}"#, "--logprobs -1 --seed -1 --draws 3");
    same(r#"{"kept": true, "top_p": 0.6, "n": 700}"#, "--kept --top-p 0.6 --draws 700");
    let file = files.bytes("seed.json", br#"{"n": 9}"#);
    let seeded = run(&with(&head, &format!("--params {file} --seed 5"))).tokens();
    assert_eq!(seeded, run(&with(&head, "--draws 9 --seed 5")).tokens());
    let seeded = files.bytes("seeded.json", br#"{"seed": 3}"#);
    for flags in ["--seed 5", "--seeds 1,2,3"] {
        let says = format!("{} has no effect: every object of --params has a seed", flags.split(' ').next().unwrap());
        run(&with(&head, &format!("--params {seeded} {flags}"))).assert_refused(&says);
    }
}

#[test]
fn an_array_has_one_object_for_each_row() {
    let (files, head) = small_head();
    let json = r#"[{"n": 3}, {"temperature": 0, "n": 1}, {"n": 700, "allowed_token_ids": [5, 299], "seed": 9}]"#;
    let file = files.bytes("p.json", json.as_bytes());
    let rows = run(&with(&head, &format!("--params {file}"))).tokens();
    assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [3, 1, 700]);
    assert_eq!(rows[0], run(&with(&head, "--draws 3")).tokens()[0]);
    assert_eq!(rows[1], run(&with(&head, "--temperature 0")).tokens()[1]);
    assert!(rows[2].iter().all(|t| [5, 299].contains(t)));
}

#[test]
fn raw_log_probabilities_do_not_know_the_temperature() {
    let (_files, head) = small_head();
    let of = |flags: &str| run(&with(&head, &format!("--draws 300 --logprobs 2 {flags}"))).rows();
    let (plain, raw) = (of(""), of("--logprobs-mode raw --temperature 0.3 --top-k 4"));
    for (plain, raw) in plain.iter().zip(&raw) {
        assert_eq!((&plain["log_z"], &plain["top"]), (&raw["log_z"], &raw["top"]));
        assert_ne!(plain["tokens"], raw["tokens"]);
        assert_eq!(raw["logprobs"].as_array().unwrap().len(), 300);
        let first = &raw["top"][0];
        let at = raw["tokens"].as_array().unwrap().iter().position(|token| *token == first["token"]);
        assert_eq!(at.map(|at| &raw["logprobs"][at]), Some(&first["logprob"]));
    }
}

#[test]
fn bad_parameters_are_one_clear_line() {
    let (files, head) = small_head();
    let refused = |json: &str, says: &str| {
        let file = files.bytes("bad.json", json.as_bytes());
        run(&with(&head, &format!("--params {file}"))).assert_refused(says);
    };
    refused("", "bad.json: not a valid parameter file: EOF");
    refused("{\n \"top_k\": 5,\n \"top_p\": 0\n}", "must be above 0 and at most 1 (line 3 column 11)");
    let lines = r#"{"top_p": 1.5} => bad.json: not a valid parameter file: top_p is 1.5, but must be above 0 and at most 1
        {"temprature": 5} => unknown field `temprature`; did you mean `temperature`? (line 1 column 16)
        {"prompt_tokens_ids": []} => did you mean `prompt_token_ids`?
        {"a_field_that_none_is_like": 5} => unknown field `a_field_that_none_is_like`, expected one of `
        {"max_tokens": 5} => max_tokens does not affect a draw; n is the number of draws
        {"temperature": 1e-400} => temperature: 1e-400 rounds to 0 as a float32 (line 1 column 17)
        {"temperature": 1e-50} => temperature: 1e-50 rounds to 0 as a float32
        [{}, {}, {"temperature": "hot"}] => row 2: temperature: invalid type: string "hot"
        [{}] => it has 1 object for 3 rows; one object without an array serves every row
        {"n": 0} => n is 0, but must be at least 1
        {"n": 20000000} => row 0: n = 20000000, but a row has at most 10000000 draws
        {"logit_bias": {"300": 1}} => logit_bias names token 300, but the vocabulary has size 300
        [{}, {"allowed_token_ids": [1, 400]}, {}] => row 1: allowed_token_ids names token 400
        {"logprobs": 301} => logprobs is 301, but the vocabulary has size 300"#;
    for line in lines.lines() {
        let (json, says) = line.trim().split_once(" => ").unwrap();
        refused(json, says);
    }
    assert_refusals(
        &head,
        "
        --params /nonexistent/p.json => /nonexistent/p.json: No such file
        --params p.json --top-k 5 => '--params <FILE>' cannot be used with '--top-k <K>'
        --allowed-token-ids 4,300 => --allowed-token-ids names token 300
        --dry-penalty-last-n -2 => --dry-penalty-last-n
        --prompt-tokens 1,x => \"x\" is not a token id",
    );
}

#[test]
fn kept_lists_the_kept_tokens() {
    let (_files, head) = small_head();
    let first = |flags: &str| -> serde_json::Value {
        let run = run(&with(&head, flags));
        assert_eq!(run.code, 0, "{run:#?}");
        serde_json::from_str(run.stdout.lines().next().unwrap()).unwrap()
    };
    let row = first("--top-k 5 --kept --draws 40 --logprobs 5");
    assert_eq!(row["kept"]["count"], 5);
    let mut top: Vec<_> = row["top"].as_array().unwrap().iter().map(|t| t["token"].as_u64().unwrap()).collect();
    top.sort_unstable();
    let kept: Vec<_> = row["kept"]["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect();
    assert_eq!(kept, top);
    assert!(row["tokens"].as_array().unwrap().iter().all(|token| kept.contains(&token.as_u64().unwrap())));
    assert!((row["kept"]["log_mass"].as_f64().unwrap() - row["log_z"].as_f64().unwrap()).abs() < 1e-6, "{row}");
    assert!(first("--top-k 5").get("kept").is_none());
}
