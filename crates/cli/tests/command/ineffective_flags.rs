//! Flags without effect and values out of range are refused by name, before a head is read.

use crate::common::{Files, assert_refusals, run, run_logging, small_head, with, words};
use clap::CommandFactory;
use flash_sampling_cli::args::Cli;

/// `sample` of a missing head, whose error shows that the flags are valid.
fn unreadable(files: &Files) -> Vec<String> {
    let name = files.name("none.npy");
    words(&format!("sample --format json --weight {name} --hidden {name}"))
}

/// Flags whose first one has no effect; the reason; and flags that give it an effect.
const INEFFECTIVE: [(&str, &str, &str); 17] = [
    ("--min-tokens 4", "without --stop-token-ids", "--stop-token-ids 7"),
    ("--stop-token-ids 7", "without --min-tokens", "--min-tokens 4"),
    ("--repetition-penalty 1.5", "without --prompt-tokens or --output-tokens", "--prompt-tokens 7"),
    ("--frequency-penalty 1", "without --output-tokens", "--output-tokens 7"),
    ("--presence-penalty 1", "without --output-tokens", "--output-tokens 7"),
    ("--presence-penalty 1 --prompt-tokens 7", "without --output-tokens", "--output-tokens 7 --repetition-penalty 1.5"),
    ("--dry-multiplier 1", "without --prompt-tokens or --output-tokens", "--output-tokens 7,7,7"),
    ("--dry-multiplier 1 --dry-penalty-last-n 0 --output-tokens 7,7,7", "at --dry-penalty-last-n 0", ""),
    ("--dry-base 2", "without --dry-multiplier", "--dry-multiplier 1 --output-tokens 7,7"),
    ("--dry-allowed-length 3", "without --dry-multiplier", "--dry-multiplier 1 --output-tokens 7,7,7"),
    ("--dry-penalty-last-n 9", "without --dry-multiplier", "--dry-multiplier 1 --output-tokens 7,7,7"),
    ("--dry-sequence-breakers 9", "without --dry-multiplier", "--dry-multiplier 1 --output-tokens 7,7,7"),
    ("--prompt-tokens 7", "without --repetition-penalty or", "--repetition-penalty 2"),
    ("--output-tokens 7", "without --repetition-penalty or", "--presence-penalty 1"),
    ("--xtc-threshold 0.2", "without --xtc-probability", "--xtc-probability 0.5"),
    ("--xtc-probability 0.5 --xtc-threshold 0.6", "at --xtc-threshold above 0.5", ""),
    ("--order llama-cpp", "without --top-k or --top-p or", "--top-p 0.5"),
];

/// The error of the first of these flags.
fn no_effect(flags: &str, reason: &str) -> String {
    format!("{} has no effect {reason}", flags.split(' ').next().unwrap())
}

#[test]
fn a_flag_without_effect_names_the_flags_that_it_needs() {
    let (files, head) = small_head();
    let unreadable = unreadable(&files);
    for (flags, reason, beside) in INEFFECTIVE {
        run(&with(&unreadable, flags)).assert_refused(&no_effect(flags, reason));
        if !beside.is_empty() {
            let taken = run(&with(&head, &format!("{flags} {beside}")));
            assert_eq!(taken.code, 0, "{flags} {beside}: {taken:#?}");
        }
    }
    // The flags are valid, so the error is about the head.
    run(&with(&unreadable, "--top-k 5")).assert_refused("none.npy: No such file");
}

/// Users sweep the temperature and leave the filters.
#[test]
fn filters_of_a_greedy_row_are_a_warning() {
    let (_files, head) = small_head();
    let text = words("generate --max-tokens 5");
    for filter in ["--top-k 5", "--top-p 0.5", "--min-p 0.5", "--top-n-sigma 1", "--epsilon-cutoff 0.1"] {
        let flag = filter.split(' ').next().unwrap();
        for base in [&head[..], &text] {
            let plain = run_logging("warn", &with(base, "--temperature 0"));
            let filtered = run_logging("warn", &with(base, &format!("--temperature 0 {filter}")));
            assert_eq!((plain.code, plain.stderr.as_str()), (0, ""), "{plain:#?}");
            assert_eq!((filtered.code, &filtered.stdout), (0, &plain.stdout), "{filtered:#?}");
            let lines: Vec<_> = filtered.stderr.lines().collect();
            let says = format!("{flag} has no effect at --temperature 0");
            assert!(lines.len() == 1 && lines[0].contains(&says), "{lines:?}");
        }
    }
    // A flag without effect at any temperature is refused.
    run(&with(&head, "--temperature 0 --top-k 5 --dry-base 2")).assert_refused("--dry-base has no effect without");
}

/// An unsupported filter is an error, without a second message that it has no effect.
#[test]
fn filters_of_a_greedy_row_that_a_sampler_lacks_are_refused_without_a_warning() {
    let (files, head) = small_head();
    let text = words("generate --max-tokens 5");
    for base in [&head[..], &text] {
        run_logging("warn", &with(base, "--variant grouped:64 --temperature 0 --top-k 5")).assert_refused("--top-k");
    }
    let file = files.bytes("p.json", br#"[{}, {"temperature": 0, "top_k": 5}, {"temperature": 0}]"#);
    let found = run_logging("error", &with(&head, &format!("--variant grouped:64 --params {file}")));
    let warned = run_logging("warn", &with(&head, &format!("--variant grouped:64 --params {file}")));
    assert_eq!((found.code, found.stdout), (1, warned.stdout.clone()));
    assert!(warned.rows()[1]["error"].as_str().unwrap().contains("top_k"), "{warned:#?}");
    assert!(!warned.stderr.contains("has no effect"), "{warned:#?}");
    // With a sampler that has filters, the same file is a warning.
    let taken = run_logging("warn", &with(&head, &format!("--params {file}")));
    assert!(taken.code == 0 && taken.stderr.contains("row 1: top_k has no effect at temperature 0"), "{taken:#?}");
}

/// Engines number image placeholders outside the vocabulary.
#[test]
fn tokens_of_a_history_outside_the_vocabulary_are_a_warning() {
    let (files, head) = small_head();
    for flag in ["--prompt-tokens", "--output-tokens"] {
        let of = |tokens: &str| run_logging("warn", &with(&head, &format!("--repetition-penalty 1.5 {flag} {tokens}")));
        let (inside, beyond) = (of("1"), of("1,999999"));
        assert_eq!((inside.code, inside.stderr.as_str()), (0, ""), "{inside:#?}");
        assert_eq!((beyond.code, &beyond.stdout), (0, &inside.stdout), "{beyond:#?}");
        assert!(
            beyond.stderr.contains(&format!("{flag} names token 999999, but the vocabulary has size")),
            "{beyond:#?}"
        );
    }
    for field in ["prompt_token_ids", "output_token_ids"] {
        let of = |tokens: &str| {
            let json =
                format!(r#"[{{}}, {{"repetition_penalty": 1.5, "{field}": [1{tokens}]}}, {{"{field}": [1{tokens}]}}]"#);
            let file = files.bytes("p.json", json.as_bytes());
            run_logging("warn", &with(&head, &format!("--params {file}")))
        };
        let (inside, beyond) = (of(""), of(", 300"));
        assert_eq!((inside.code, inside.stderr.as_str()), (0, ""), "{inside:#?}");
        assert_eq!((beyond.code, &beyond.stdout), (0, &inside.stdout), "{beyond:#?}");
        let lines: Vec<_> = beyond.stderr.lines().collect();
        let says = format!("p.json: row 1: {field} names token 300, but the vocabulary has size 300");
        assert!(lines.len() == 1 && lines[0].contains(&says), "{lines:?}");
    }
}

#[test]
fn values_out_of_range_are_refused_before_a_head_is_read() {
    let files = Files::new();
    let unreadable = unreadable(&files);
    let folder = files.name("none");
    for base in [&unreadable[..], &words(&format!("generate --model {folder}"))] {
        assert_refusals(
            base,
            "
            --temperature 1e-45 => --temperature is 1e-45, but must be large enough to divide by
            --top-p 0 => --top-p is 0.0, but must be above 0 and at most 1
            --min-p 1.5 => --min-p is 1.5, but must be between 0 and 1
            --top-n-sigma -1 => --top-n-sigma is -1.0, but must be finite and not negative
            --epsilon-cutoff nan => --epsilon-cutoff is NaN
            --typical-p 2 => --typical-p is 2.0
            --typical-p 0.5 --temperature 0 => --typical-p can drop the largest logit, which a greedy row takes
            --xtc-threshold 0 => --xtc-threshold is 0.0
            --xtc-probability 2 => --xtc-probability is 2.0
            --repetition-penalty 0 => --repetition-penalty is 0.0, but must be finite and above 0
            --frequency-penalty inf => --frequency-penalty is inf
            --presence-penalty 1e30 => --presence-penalty is 1e30, but must be between -2^64 and 2^64
            --dry-multiplier -1 => --dry-multiplier is -1.0
            --dry-base 0.5 => --dry-base is 0.5, but must be finite and at least 1",
        );
    }
    run(&with(&unreadable, "--kept --temperature 0")).assert_refused("--kept is not defined for a greedy row");
}

#[test]
fn a_flag_of_generate_that_changes_nothing_names_what_it_lacks() {
    let files = Files::new();
    let folder = files.name("none");
    let base = words(&format!("generate --model {folder}"));
    // In `generate`, the sequence is generated, and the model ends it, so these flags have an effect.
    let own = ["--min", "--stop", "--rep", "--freq", "--pres", "--dry-multiplier", "--prompt", "--output"];
    for (flags, reason, _) in
        INEFFECTIVE.into_iter().filter(|(flags, ..)| !own.iter().any(|own| flags.starts_with(own)))
    {
        run(&with(&base, flags)).assert_refused(&no_effect(flags, reason));
    }
    run(&with(&base, "--frequency-penalty 1 --min-tokens 4 --stop-token-ids 7")).assert_refused("none");
    run(&with(&base, "--min-tokens 11 --max-tokens 10")).assert_refused("--min-tokens is 11, but --max-tokens is 10");
    run(&with(&base, "--min-tokens 10 --max-tokens 10")).assert_refused("none");
    // The layers run on the CPU, also with another backend of the draw.
    let layers = run(&words("generate --max-tokens 2 --backend reference"));
    assert_eq!(layers.code, 0, "{layers:#?}");
}

#[test]
fn fields_without_effect_are_a_warning_and_change_no_draw() {
    let (files, head) = small_head();
    let of = |base: &[String], json: &str| {
        let file = files.bytes("p.json", json.as_bytes());
        let run = run_logging("warn", &with(base, &format!("--params {file}")));
        assert_eq!(run.code, 0, "{run:#?}");
        run
    };
    let plain = |n| of(&head, &format!(r#"{{"n": {n}}}"#));
    assert_eq!(plain(200).stderr, "");
    for (fields, says) in [
        (r#""min_tokens": 4"#, "min_tokens has no effect without stop_token_ids"),
        (
            r#""repetition_penalty": 1.5"#,
            "repetition_penalty has no effect without prompt_token_ids or output_token_ids",
        ),
        (
            r#""presence_penalty": 1.5, "prompt_token_ids": [7]"#,
            "presence_penalty has no effect without output_token_ids",
        ),
        (r#""xtc_probability": 0.5, "xtc_threshold": 0.6"#, "xtc_probability has no effect at xtc_threshold above 0.5"),
        (r#""order": "llama-cpp""#, "order has no effect without top_k or top_p or"),
        // Default values and unused lists give no warning.
        (r#""prompt_token_ids": [7], "output_token_ids": [8], "stop_token_ids": [9]"#, ""),
    ] {
        let found = of(&head, &format!(r#"[{{"n": 200}}, {{"n": 200, {fields}}}, {{"n": 200, {fields}}}]"#));
        assert_eq!(found.stdout, plain(200).stdout, "{fields}");
        let lines: Vec<_> = found.stderr.lines().collect();
        match says {
            "" => assert!(lines.is_empty(), "{lines:?}"),
            says => assert!(lines.len() == 1 && lines[0].contains(&format!("p.json: row 1: {says}")), "{lines:?}"),
        }
    }
    let text = words("generate --max-tokens 9");
    let (greedy, filtered) = (of(&text, r#"{"temperature": 0}"#), of(&text, r#"{"temperature": 0, "top_p": 0.9}"#));
    assert_eq!((&filtered.stdout, greedy.stderr.as_str()), (&greedy.stdout, ""));
    assert!(filtered.stderr.contains("p.json: sequence 0: top_p has no effect at temperature 0"), "{filtered:#?}");
    assert_eq!(of(&text, r#"{"min_tokens": 4, "presence_penalty": 1, "stop_token_ids": [7]}"#).stderr, "");
}

/// In a file, the same knob is an error of its row.
#[test]
fn flags_that_a_sampler_lacks_are_refused_before_a_head_is_read() {
    let (files, head) = small_head();
    let unreadable = unreadable(&files);
    let folder = files.name("none");
    let text = words(&format!("generate --model {folder}"));
    let (mut refused, mut taken) = (0, 0);
    let variants = "tiled, grouped:64, online:64, sharded:4, sharded:4:log-mass, tiled --backend reference";
    for variant in variants.split(", ").flat_map(|variant| [variant.to_owned(), format!("{variant} --canonical")]) {
        // They refuse every canonical plan.
        if ["grouped:64 --canonical", "online:64 --canonical"].contains(&&*variant) {
            continue;
        }
        for (flags, json) in [
            ("--top-k 5", r#"{"top_k": 5}"#),
            ("--top-p 0.5", r#"{"top_p": 0.5}"#),
            ("--xtc-probability 0.5", r#"{"xtc_probability": 0.5}"#),
            ("--kept", r#"{"kept": true}"#),
            ("--logprobs 1 --logprobs-mode raw", r#"{"logprobs": 1, "logprobs_mode": "raw_logprobs"}"#),
            ("--repetition-penalty 2 --prompt-tokens 3", r#"{"repetition_penalty": 2, "prompt_token_ids": [3]}"#),
        ] {
            let file = files.bytes("p.json", json.as_bytes());
            let by_file = run(&with(&head, &format!("--variant {variant} --params {file}")));
            let by_flags = with(&unreadable, &format!("--variant {variant} {flags}"));
            match by_file.rows()[0]["error"].as_str() {
                Some(says) => {
                    refused += 1;
                    let (field, says) = says.split_once(' ').unwrap();
                    let says = &format!("--{} {says}", field.replace('_', "-"));
                    run(&by_flags).assert_refused(says);
                    if !flags.contains("kept") {
                        run(&with(&text, &format!("--variant {variant} {flags}"))).assert_refused(says);
                    }
                }
                None => {
                    taken += 1;
                    run(&by_flags).assert_refused("none.npy: No such file");
                }
            }
        }
    }
    assert!(refused > 20 && taken > 20, "{refused} refused, {taken} taken");
}

/// Each flag of a row changes the draw, is refused, or gives a warning: alone, and for a greedy draw. A new flag must
/// be listed in this test.
#[test]
fn every_flag_of_a_row_has_an_effect_or_a_message() {
    /// Flags with a visible effect on a draw, and a value for each.
    const VALUES: &str = "temperature=0.2 seed=5 position=5 seeds=1,2,3 draws=3 allowed-token-ids=4,9 logit-bias=4:40 \
        logprobs=2 top-k=2 top-p=0.1 min-p=0.9 top-n-sigma=0.1 epsilon-cutoff=0.01 typical-p=0.1 xtc-threshold=0.2 \
        xtc-probability=1 order=llama-cpp repetition-penalty=3 frequency-penalty=3 presence-penalty=3 \
        dry-multiplier=3 dry-base=3 dry-allowed-length=3 dry-penalty-last-n=3 min-tokens=3 prompt-tokens=3 \
        output-tokens=3 stop-token-ids=3";
    /// Flags that need a file or do not change this draw; other tests check them.
    const OTHERS: &str =
        "without-replacement canonical mask logprobs-mode kept params banned-token-ids dry-sequence-breakers";
    let values: Vec<_> = VALUES.split(' ').map(|flag| flag.split_once('=').unwrap()).collect();
    let cli = Cli::command();
    let sample = cli.find_subcommand("sample").unwrap();
    for group in ["RowArgs", "ParamArgs", "FilterArgs", "PenaltyArgs"] {
        for flag in sample.get_groups().find(|g| g.get_id() == group).unwrap().get_args() {
            let flag = flag.as_str().replace('_', "-");
            let is_known = values.iter().any(|(name, _)| *name == flag) || OTHERS.split(' ').any(|name| name == flag);
            assert!(is_known, "--{flag} of {group}");
        }
    }
    let (_files, head) = small_head();
    // A greedy draw has no noise.
    for (base, silent) in
        [("--draws 400", &["draws"][..]), ("--temperature 0", &["temperature", "seed", "position", "seeds"])]
    {
        let base = with(&head, base);
        let plain = run(&base);
        for (flag, value) in values.iter().filter(|(flag, _)| !silent.contains(flag)) {
            let found = run_logging("warn", &with(&base, &format!("--{flag} {value}")));
            let is_refused = found.code == 2 && found.stderr.contains(&format!("--{flag} "));
            let is_seen = found.code == 0 && found.stdout != plain.stdout;
            let has_warning = found.code == 0 && found.stderr.contains(&format!("--{flag} has no effect at"));
            assert!(is_refused || is_seen || has_warning, "{base:?} --{flag} {value}: {}", found.stderr);
        }
    }
}
