//! Valid requests, and errors of invalid requests.

use super::*;
use crate::params::transform::is_allowed;
#[cfg(feature = "serde")]
use proptest::prelude::*;

#[test]
fn the_default_is_the_default_row() {
    let params = SamplingParams::builder().build(300).unwrap();
    assert_eq!(params.row(0, 0, None), RowParams::default());
    assert!(params.row(0, 0, None).enabled().is_empty());
}

#[test]
fn fields_reach_the_row() {
    let params = SamplingParams::builder()
        .temperature(0.5)
        .top_k(-1)
        .n(3)
        .logit_bias([(9, 1.5), (2, -1.0)].into())
        .allowed_token_ids(Some(vec![40, 2]))
        .dry_sequence_breakers(vec![7, 3])
        .build(300)
        .unwrap();
    let row = params.row(11, 5, None);
    assert_eq!((row.temperature, row.top_k, row.draws, row.seed, row.position), (0.5, 0, 3, 11, 5));
    assert_eq!(row.logit_bias, [(2, -1.0), (9, 1.5)]);
    assert_eq!(row.dry_sequence_breakers, [3, 7]);
    let mask = row.mask.unwrap();
    assert!((0..70).all(|token| is_allowed(mask, token) == [40, 2].contains(&token)));
    let seeded = SamplingParams::builder().seed(Some(8)).build(300).unwrap();
    assert_eq!(seeded.row(11, 5, None).seed, 8);
}

#[test]
fn values_out_of_range_name_their_field() {
    let b = SamplingParams::builder;
    let bias = |value| [(3, value)].into();
    let cases = [
        (b().n(0), "n is 0, but must be at least 1"),
        (b().temperature(-0.5), "temperature is -0.5, but must be finite and not negative"),
        (b().temperature(f32::NAN), "temperature is NaN, but must be finite and not negative"),
        (b().top_p(0.0), "top_p is 0.0, but must be above 0 and at most 1"),
        (b().top_p(1.5), "top_p is 1.5, but must be above 0 and at most 1"),
        (b().top_k(-2), "top_k is -2, but must be at least -1"),
        (b().min_p(-0.1), "min_p is -0.1, but must be between 0 and 1"),
        (b().presence_penalty(f32::INFINITY), "presence_penalty is inf, but must be between -2^64 and 2^64"),
        (b().frequency_penalty(f32::NAN), "frequency_penalty is NaN, but must be between -2^64 and 2^64"),
        (b().repetition_penalty(0.0), "repetition_penalty is 0.0, but must be finite and above 0"),
        (b().logit_bias(bias(f32::NAN)), "logit_bias has a value that is NaN or +inf"),
        (b().allowed_token_ids(Some(vec![])), "allowed_token_ids must name a token"),
        (
            b().allowed_token_ids(Some(vec![!1])),
            "allowed_token_ids names token 4294967294, but the vocabulary has size 300",
        ),
        (
            b().allowed_token_ids(Some(vec![300, 2])),
            "allowed_token_ids names token 300, but the vocabulary has size 300",
        ),
        (b().logit_bias([(300, 1.0)].into()), "logit_bias names token 300, but the vocabulary has size 300"),
        (b().banned_token_ids(vec![!0]), "banned_token_ids names token 4294967295, but the vocabulary has size 300"),
        (b().stop_token_ids(vec![2, 300]), "stop_token_ids names token 300, but the vocabulary has size 300"),
        (b().logprobs(Some(301)), "logprobs is 301, but the vocabulary has size 300"),
        (b().logprob_token_ids(vec![1, 300]), "logprob_token_ids names token 300, but the vocabulary has size 300"),
        (b().ranks(true), "ranks needs logprobs"),
        (b().top_n_sigma(-1.0), "top_n_sigma is -1.0, but must be finite and not negative"),
        (b().epsilon_cutoff(2.0), "epsilon_cutoff is 2.0, but must be between 0 and 1"),
        (b().typical_p(0.0), "typical_p is 0.0, but must be above 0 and at most 1"),
        (b().xtc_threshold(0.0), "xtc_threshold is 0.0, but must be above 0 and at most 1"),
        (b().xtc_probability(2.0), "xtc_probability is 2.0, but must be between 0 and 1"),
        (b().dry_multiplier(-1.0), "dry_multiplier is -1.0, but must be finite and not negative"),
        (b().dry_base(0.5), "dry_base is 0.5, but must be finite and at least 1"),
        (b().dry_penalty_last_n(-2), "dry_penalty_last_n is -2, but must be at least -1"),
    ];
    for (builder, says) in cases {
        assert_eq!(builder.build(300).unwrap_err().to_string(), says);
    }
}

#[cfg(feature = "serde")]
#[test]
fn a_request_of_vllm_maps_without_a_table() {
    let json = r#"{"n": 2, "temperature": 0.7, "top_p": 0.95, "top_k": -1, "min_p": 0.05, "seed": 42,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"11": -1.5, "2": 3},
        "allowed_token_ids": null, "min_tokens": 4, "stop_token_ids": [2], "logprobs": 5,
        "logprobs_mode": "raw_logprobs", "logprob_token_ids": [7, 2, 7], "ranks": true, "order": "llama-cpp"}"#;
    let read = |json: &str| serde_json::from_str::<SamplingParamsBuilder>(json);
    let params = read(json).unwrap().build(300).unwrap();
    let row = params.row(0, 0, None);
    assert_eq!((row.draws, row.temperature, row.top_k, row.seed, row.logprobs), (2, 0.7, 0, 42, Some(5)));
    assert_eq!((row.logit_bias, row.stop_token_ids), (&[(2, 3.0), (11, -1.5)][..], &[2][..]));
    assert_eq!((row.logprobs_mode, row.order), (LogprobsMode::Raw, Order::LlamaCpp));
    assert_eq!((row.logprob_token_ids, row.ranks), (&[7, 2, 7][..], true));
    let again = serde_json::to_string(params.fields()).unwrap();
    assert_eq!(&read(&again).unwrap(), params.fields());
    for (json, says) in [
        (r#"{"temprature": 5}"#, "unknown field `temprature`"),
        (r#"{"top_k": 0.5}"#, "top_k: invalid type: floating point"),
        (r#"{"logit_bias": {"11": "low"}}"#, "logit_bias: invalid type: string \"low\""),
        (
            r#"{"top_p": "much"}"#,
            "top_p: invalid type: string \"much\", expected a number, \"-inf\", \"inf\" or \"NaN\"",
        ),
        (r#"{"prompt_token_ids": [1]}"#, "prompt_token_ids is the sequence's, not a parameter"),
        (r#"{"order": "ours"}"#, "order: unknown variant `ours`, expected one of `vllm`, `hugging-face`, `llama-cpp`"),
        (
            r#"{"order": ["top_p"]}"#,
            "order: invalid type: sequence, expected one of `vllm`, `hugging-face` and `llama-cpp`",
        ),
        (r#"{"temperature": 1e-50}"#, "temperature: 1e-50 rounds to 0 as a float32"),
        (r#"{"top_p": 1e-60}"#, "top_p: 1e-60 rounds to 0 as a float32"),
        (r#"{"min_p": 1e-60}"#, "min_p: 1e-60 rounds to 0 as a float32"),
        (r#"[1]"#, "expected an object of sampling parameters"),
        (r#"{"seed": -2}"#, "seed: invalid value: integer `-2`, expected an integer of at least -1"),
        (r#"{"logprobs": 4294967296}"#, "must be below 2^32"),
        (r#"{"n": 1, "n": 2}"#, "duplicate field `n`"),
    ] {
        let error = read(json).unwrap_err().to_string();
        assert!(error.contains(says), "{json}: {error}");
    }
    for (json, says) in [
        (r#"{"top_p": 2}"#, "top_p is 2.0, but must be"),
        (r#"{"temperature": 1e99}"#, "temperature is inf, but must be"),
        (r#"{"temperature": "NaN"}"#, "temperature is NaN, but must be"),
    ] {
        assert!(read(json).unwrap().build(300).unwrap_err().to_string().starts_with(says), "{json}");
    }
}

#[cfg(feature = "serde")]
proptest! {
    /// JSON text and JSON values restore all fields. Floats have any bits, but one NaN, as JSON has one.
    #[test]
    fn json_gives_every_field_back(
        floats in prop::collection::vec(float(), 16),
        bias in prop::collection::btree_map(any::<u32>(), float(), 0..4),
        (n, min_tokens, allowed_length) in any::<(u32, u32, u32)>(),
        (top_k, last_n, choices) in (-1..i32::MAX, -1..i32::MAX, 0usize..24),
        (seed, logprobs) in any::<(Option<u64>, Option<u32>)>(),
        lists in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..4), 4),
    ) {
        let [temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty, ..] = floats[..] else {
            unreachable!()
        };
        let [top_n_sigma, epsilon_cutoff, typical_p, xtc_threshold, xtc_probability, dry_multiplier, dry_base, ..] =
            floats[6..]
        else {
            unreachable!()
        };
        let fields = SamplingParamsBuilder {
            n,
            temperature,
            top_p,
            top_k,
            min_p,
            seed,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            logit_bias: bias,
            allowed_token_ids: (choices % 2 == 0).then(|| lists[0].clone()),
            banned_token_ids: lists[1].clone(),
            min_tokens,
            stop_token_ids: lists[2].clone(),
            logprobs,
            logprobs_mode: [LogprobsMode::Processed, LogprobsMode::Raw][choices / 2 % 2],
            logprob_token_ids: lists[1].clone(),
            ranks: n % 3 == 0,
            top_n_sigma,
            epsilon_cutoff,
            typical_p,
            xtc_threshold,
            xtc_probability,
            dry_multiplier,
            dry_base,
            dry_allowed_length: allowed_length,
            dry_penalty_last_n: last_n,
            dry_sequence_breakers: lists[3].clone(),
            order: [Order::Vllm, Order::HuggingFace, Order::LlamaCpp][choices / 4 % 3],
            without_replacement: choices / 12 == 1,
            kept: n % 2 == 0,
        };
        let text = serde_json::to_string(&fields).unwrap();
        prop_assert!(!text.contains("NaN") || floats.iter().chain(fields.logit_bias.values()).any(|x| x.is_nan()));
        let of_text: SamplingParamsBuilder = serde_json::from_str(&text).unwrap();
        let of_value: SamplingParamsBuilder = serde_json::from_value(serde_json::to_value(&fields).unwrap()).unwrap();
        // Debug output differs for all floats with different bits, except NaN.
        prop_assert_eq!(format!("{of_text:?}"), format!("{fields:?}"));
        prop_assert_eq!(format!("{of_value:?}"), format!("{fields:?}"));
    }
}

/// Floats of any bits; a quarter of them have no JSON number.
#[cfg(feature = "serde")]
fn float() -> impl Strategy<Value = f32> {
    let none = prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
    prop_oneof![3 => any::<u32>().prop_map(f32::from_bits), 1 => none]
}

/// Numbers in the form of serde_json's feature `arbitrary_precision`, as JSON objects with the private key.
#[cfg(feature = "serde")]
#[test]
fn numbers_of_arbitrary_precision_are_read() {
    let read = |fields: &[(&str, &str)]| {
        let field = |(name, text): &(&str, &str)| format!(r#""{name}": {{"$serde_json::private::Number": "{text}"}}"#);
        let json = format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(", "));
        serde_json::from_str::<SamplingParamsBuilder>(&json).map_err(|error| error.to_string())
    };
    let seed = u64::MAX.to_string();
    let fields = [("temperature", "0.7"), ("presence_penalty", "-1e-2"), ("top_p", "1"), ("seed", &*seed)];
    let want = SamplingParamsBuilder::default().temperature(0.7).presence_penalty(-0.01).seed(Some(u64::MAX));
    assert_eq!(read(&fields).unwrap(), want);
    assert_eq!(read(&[("logprobs", "-1")]).unwrap().logprobs, Some(u32::MAX));
    assert_eq!(read(&[("best_of", "1"), ("length_penalty", "1.0")]).unwrap(), SamplingParamsBuilder::default());
    for (field, text, says) in [
        ("temperature", "1e-50", "temperature: 1e-50 rounds to 0 as a float32"),
        ("temperature", "much", "temperature: invalid type: string \"much\", expected a number"),
        ("seed", "-2", "seed: invalid value: integer `-2`, expected an integer of at least -1"),
        ("seed", "0.5", "seed: invalid type: floating point"),
        ("best_of", "2", "best_of does not affect a draw: it must be null or 1"),
    ] {
        let error = read(&[(field, text)]).unwrap_err();
        assert!(error.starts_with(says), "{error}");
    }
    let error = serde_json::from_str::<SamplingParamsBuilder>(r#"{"top_p": {"value": 0.5}}"#).unwrap_err().to_string();
    assert!(error.starts_with("top_p: invalid type: map, expected a number"), "{error}");
}

#[cfg(feature = "serde")]
#[test]
fn a_ban_by_logit_bias_survives_json() {
    let ban = SamplingParams::builder().logit_bias([(3, f32::NEG_INFINITY), (5, 1.0)].into());
    let json = serde_json::to_string(&ban).unwrap();
    assert!(json.contains(r#""logit_bias":{"3":"-inf","5":1.0}"#), "{json}");
    let params = serde_json::from_str::<SamplingParamsBuilder>(&json).unwrap().build(300).unwrap();
    assert_eq!(params.row(0, 0, None).logit_bias, [(3, f32::NEG_INFINITY), (5, 1.0)]);
}

#[cfg(feature = "serde")]
#[test]
fn null_is_the_default_and_minus_one_is_none_or_all() {
    // vLLM's defaults in a request, and every field as null.
    let defaults = r#"{"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": null, "stop_token_ids": null,
        "min_tokens": 0, "logprobs": null, "logit_bias": null, "allowed_token_ids": null}"#;
    let default = SamplingParamsBuilder::default();
    assert_eq!(serde_json::from_str::<SamplingParamsBuilder>(defaults).unwrap(), default);
    let serde_json::Value::Object(mut fields) = serde_json::to_value(&default).unwrap() else { panic!() };
    fields.values_mut().for_each(|value| *value = serde_json::Value::Null);
    assert_eq!(serde_json::from_value::<SamplingParamsBuilder>(fields.into()).unwrap(), default);

    let read: SamplingParamsBuilder = serde_json::from_str(r#"{"seed": -1, "logprobs": -1, "top_k": -1}"#).unwrap();
    assert_eq!((read.seed, read.logprobs, read.top_k), (None, Some(u32::MAX), -1));
    assert_eq!(read.build(300).unwrap().row(5, 0, None).logprobs, Some(300));
    let seed = r#"{"seed": 18446744073709551615}"#;
    assert_eq!(serde_json::from_str::<SamplingParamsBuilder>(seed).unwrap().seed, Some(u64::MAX));
}

#[cfg(feature = "serde")]
#[test]
fn fields_that_do_not_affect_a_draw_must_be_neutral() {
    let read = |json: &str| serde_json::from_str::<SamplingParamsBuilder>(json);
    let neutral = r#"{"stop": [], "ignore_eos": false, "max_tokens": null, "prompt_logprobs": null, "detokenize": true,
        "flat_logprobs": false, "skip_special_tokens": true, "spaces_between_special_tokens": true, "top_k": 7,
        "include_stop_str_in_output": false, "output_kind": 0, "skip_clone": false, "output_text_buffer_length": 0,
        "structured_outputs": null, "guided_decoding": null, "extra_args": {}, "bad_words": [], "best_of": 1,
        "truncate_prompt_tokens": null, "skip_reading_prefix_cache": null, "thinking_token_budget": null}"#;
    assert_eq!(read(neutral).unwrap(), SamplingParamsBuilder::default().top_k(7));
    let takes = "does not affect a draw: it must be null";
    for (field, value, or) in [
        ("stop", r#"["."]"#, " or empty"),
        ("stop", r#"".""#, " or empty"),
        ("max_tokens", "16", ""),
        ("ignore_eos", "true", " or false"),
        ("detokenize", "false", " or true"),
        ("best_of", "2", " or 1"),
        ("guided_decoding", r#"{"regex": "a"}"#, ""),
        ("extra_args", r#"{"a": 1}"#, " or empty"),
        ("prompt_logprobs", "0", ""),
    ] {
        let error = read(&format!(r#"{{"top_k": 7, "{field}": {value}}}"#)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{field} {takes}{or} at line 1")), "{error}");
    }
    assert!(read(r#"{"stop": null, "stop": null}"#).unwrap_err().to_string().contains("duplicate field `stop`"));
}
