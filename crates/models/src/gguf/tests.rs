//! Tests of the reader on files that are built byte by byte.

use super::*;
use crate::config::{Family, ModelConfig};
use crate::rotary::{Pairing, Scaling};

/// A value as bytes: its type, then `bytes`.
fn value(kind: u32, bytes: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], bytes].concat()
}

fn uint(n: u32) -> Vec<u8> {
    value(4, &n.to_le_bytes())
}

fn float(x: f32) -> Vec<u8> {
    value(6, &x.to_le_bytes())
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn text(text: &str) -> Vec<u8> {
    value(8, &string(text))
}

/// A file of keys with values, tensors (name, dimensions with the fastest first, type, offset), and `data` zero bytes.
fn file(keys: &[(&str, Vec<u8>)], tensors: &[(&str, &[u64], u32, u64)], data: usize) -> Vec<u8> {
    let counts = [tensors.len() as u64, keys.len() as u64].map(u64::to_le_bytes).concat();
    let mut bytes = [&b"GGUF\x03\0\0\0"[..], &counts].concat();
    for (key, value) in keys {
        bytes.extend([string(key), value.clone()].concat());
    }
    for (name, dims, kind, offset) in tensors {
        bytes.extend([string(name), (dims.len() as u32).to_le_bytes().to_vec()].concat());
        bytes.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        bytes.extend([&kind.to_le_bytes()[..], &offset.to_le_bytes()].concat());
    }
    bytes.resize(bytes.len().next_multiple_of(32) + data, 0);
    bytes
}

fn message(bytes: &[u8]) -> String {
    Gguf::parse(bytes).unwrap_err().to_string()
}

#[test]
fn keys_and_tensors_are_read_in_both_versions() {
    let array = value(9, &[&8u32.to_le_bytes()[..], &2u64.to_le_bytes(), &string("a"), &string("bc")].concat());
    let nested = value(9, &[&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &4u32.to_le_bytes(), &[0; 8]].concat());
    let keys = [
        ("a.bool", value(7, &[1])),
        ("a.int", value(11, &(-7i64).to_le_bytes())),
        ("a.float", float(0.1)),
        ("a.texts", array),
        ("a.nested", nested),
        ("general.architecture", text("some")),
    ];
    let mut bytes = file(&keys, &[("w", &[8, 3], 0, 64), ("v", &[5], 30, 0)], 64 + 96);
    for version in [2, 3] {
        bytes[4] = version;
        let file = Gguf::parse(&bytes).unwrap();
        assert_eq!((file.version(), file.architecture().unwrap()), (version.into(), "some"));
        assert_eq!(file.value("a.bool").unwrap().as_bool(), Some(true));
        assert_eq!(file.value("a.int"), Some(Value::Signed(-7)));
        assert_eq!(file.value("a.float").unwrap().as_f64(), Some(f64::from(0.1f32)));
        let texts = file.value("a.texts").unwrap().as_array().unwrap();
        let texts: Vec<_> = texts.iter().filter_map(|text| text.as_str()).collect();
        assert_eq!(texts, ["a", "bc"]);
        let nested = file.value("a.nested").unwrap().as_array().unwrap();
        assert!(nested.iter().all(|inner| inner.as_array().is_some_and(|inner| inner.is_empty())));
        assert_eq!((nested.len(), nested.iter().count(), file.keys().count()), (1, 1, 6));
        let tensor = file.tensor("w").unwrap();
        let data = bytes.len() - 64 - 96;
        assert_eq!(
            (tensor.dtype.name(), &tensor.shape[..], tensor.range),
            ("f32", &[3, 8][..], data + 64..bytes.len())
        );
        assert_eq!(file.tensor("v").unwrap().range, data..data + 10);
        assert_eq!(file.names().collect::<Vec<_>>(), ["v", "w"]);
        assert_eq!(file.tensor("x").unwrap_err().to_string(), "there is no tensor x");
    }
}

#[test]
fn the_alignment_is_a_key() {
    let keys = |alignment: Vec<u8>| [("general.alignment", alignment)];
    let bytes = file(&keys(uint(8)), &[("w", &[2], 0, 8)], 16);
    let at = Gguf::parse(&bytes).unwrap().tensor("w").unwrap().range.start;
    assert!(at.is_multiple_of(8) && !bytes.is_empty());
    for wrong in [uint(0), uint(24), uint(1 << 31), text("32")] {
        let found = message(&file(&keys(wrong), &[], 0));
        assert!(found.contains("the key general.alignment is"), "{found}");
    }
    assert!(message(&file(&[], &[("w", &[2], 0, 8)], 64)).contains("the tensor w has offset 8, not a multiple of 32"));
}

#[test]
fn every_shorter_file_is_an_error_that_names_a_part() {
    let keys = [("a.name", text("x")), ("a.count", uint(3))];
    let bytes = file(&keys, &[("first", &[8], 0, 0), ("second", &[8, 2], 0, 32)], 96);
    assert!(Gguf::parse(&bytes).is_ok());
    for length in 0..bytes.len() {
        let found = message(&bytes[..length]);
        let names = ["GGUF", "the header", "key ", "the key a.", "tensor ", "the tensor "];
        assert!(names.iter().any(|name| found.contains(name)), "{length}: {found}");
    }
    assert!(message(&bytes[..bytes.len() - 1]).contains("the tensor second needs 64 more bytes, but the file has 63"));
}

#[test]
fn bad_files_name_the_part() {
    assert!(message(b"GGML\x03\0\0\0").contains("does not begin with GGUF"));
    assert!(message(b"GGUF\x01\0\0\0").contains("version 1; versions 2 and 3"));
    assert!(message(b"GGUF\0\0\0\x03").contains("big-endian"));
    let huge = [&b"GGUF\x03\0\0\0"[..], &u64::MAX.to_le_bytes(), &u64::MAX.to_le_bytes()].concat();
    assert!(message(&huge).contains("key 0 of 18446744073709551615"));
    let of_value = |value: Vec<u8>| message(&file(&[("a.b", value)], &[], 0));
    let array = |kind: u32, len: u64| value(9, &[&kind.to_le_bytes()[..], &len.to_le_bytes()].concat());
    for (bad, says) in [
        (value(13, &[]), "the key a.b has a value of the unknown type 13"),
        (value(8, &u64::MAX.to_le_bytes()), "the key a.b needs 18446744073709551615 more bytes"),
        (array(10, u64::MAX), "the key a.b needs 18446744073709551615 more bytes"),
        (array(8, u64::MAX), "the key a.b needs"),
        (array(77, 1), "the key a.b is an array of the unknown type 77"),
        (value(9, &[&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat().repeat(9)), "more than 4 arrays around"),
    ] {
        let found = of_value(bad);
        assert!(found.contains(says), "{says}: {found}");
    }
    assert!(message(&file(&[("a", uint(1)), ("a", uint(1))], &[], 0)).contains("the key a exists twice"));
    let of_tensor = |dims: &[u64], kind, offset| message(&file(&[], &[("t\n", dims, kind, offset)], 64));
    for (found, says) in [
        (of_tensor(&[1; 5], 0, 0), "the tensor t\\n has 5 dimensions"),
        (of_tensor(&[1 << 40, 1 << 40], 0, 0), "which overflows"),
        (of_tensor(&[4], 0, 64), "the tensor t\\n needs 16 more bytes, but the file has 0"),
        (of_tensor(&[4], 0, u64::MAX - 31), "the tensor t\\n needs 16 more bytes, but the file has 0"),
        (of_tensor(&[4], 99, 96), "the tensor t\\n needs 0 more bytes"),
    ] {
        assert!(found.contains(says), "{says}: {found}");
    }
    let two = file(&[], &[("t", &[4], 10, 0), ("u", &[4], 99, 0)], 64);
    let two = Gguf::parse(&two).unwrap();
    assert_eq!(two.tensor("t").unwrap_err().to_string(), "the tensor t has type Q2_K, which is not supported");
    assert!(two.tensor("u").unwrap_err().to_string().contains("number 99"));
}

/// The keys of a small llama model, with some values changed; `None` removes a key.
fn llama(changed: &[(&'static str, Option<Vec<u8>>)]) -> Vec<(&'static str, Vec<u8>)> {
    let mut keys = vec![
        ("general.architecture", text("llama")),
        ("llama.block_count", uint(2)),
        ("llama.embedding_length", uint(64)),
        ("llama.feed_forward_length", uint(96)),
        ("llama.attention.head_count", uint(4)),
        ("llama.attention.head_count_kv", uint(2)),
        ("llama.attention.layer_norm_rms_epsilon", float(1e-5)),
        ("llama.context_length", uint(128)),
        ("llama.rope.freq_base", float(500.0)),
        ("tokenizer.ggml.bos_token_id", uint(7)),
        ("tokenizer.ggml.eos_token_id", uint(8)),
        ("tokenizer.ggml.eot_token_id", uint(9)),
        ("tokenizer.ggml.eom_token_id", uint(8)),
    ];
    for (key, value) in changed {
        keys.retain(|(other, _)| other != key);
        keys.extend(value.clone().map(|value| (*key, value)));
    }
    keys
}

fn config(keys: &[(&str, Vec<u8>)], tensors: &[(&str, &[u64], u32, u64)]) -> Result<ModelConfig, GgufError> {
    let some: [(&str, &[u64], u32, u64); 2] = [("a", &[1], 0, 0), ("b", &[1], 0, 0)];
    let bytes = file(keys, &[&some, tensors].concat(), 4096);
    ModelConfig::from_gguf(&Gguf::parse(&bytes).unwrap())
}

#[test]
fn a_configuration_is_read_from_keys() {
    let found = config(&llama(&[]), &[]).unwrap();
    assert_eq!((found.family, found.hidden, found.intermediate, found.layers), (Family::Llama, 64, 96, 2));
    assert_eq!((found.heads, found.kv_heads, found.head_dim, found.max_positions), (4, 2, 16, 128));
    assert_eq!((found.norm_eps, found.rope_theta, found.rope_pairing), (1e-5, 500.0, Pairing::Neighbours));
    assert_eq!((found.bos, &found.eos[..], found.rope_scaling), (Some(7), &[8, 9][..], Scaling::None));
    assert!(!found.attention_bias && !found.mlp_bias);
    let biased = config(&llama(&[]), &[("blk.0.attn_q.bias", &[1], 0, 0)]).unwrap();
    assert!(biased.attention_bias && !biased.mlp_bias);
    let qwen3 = llama(&[]).into_iter().map(|(key, value)| (key.replace("llama", "qwen3"), value));
    let mut qwen3: Vec<_> = qwen3.chain([("qwen3.attention.key_length".into(), uint(32))]).collect();
    qwen3[0].1 = text("qwen3");
    let qwen3: Vec<_> = qwen3.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
    let found = config(&qwen3, &[]).unwrap();
    assert_eq!((found.family, found.head_dim, found.rope_pairing), (Family::Qwen3, 32, Pairing::Halves));
}

#[test]
fn rotary_scalings_are_keys_or_a_tensor_of_factors() {
    let of = |keys: &[(&'static str, Option<Vec<u8>>)], tensors: &[(&str, &[u64], u32, u64)]| {
        config(&llama(keys), tensors).map(|config| config.rope_scaling)
    };
    let [kind, factor] = ["llama.rope.scaling.type", "llama.rope.scaling.factor"];
    let linear = Scaling::Linear { factor: 4.0 };
    assert_eq!(of(&[(kind, Some(text("linear"))), (factor, Some(float(4.0)))], &[]).unwrap(), linear);
    assert_eq!(of(&[("llama.rope.scale_linear", Some(float(4.0)))], &[]).unwrap(), linear);
    assert_eq!(of(&[(kind, Some(text("none"))), (factor, Some(float(4.0)))], &[]).unwrap(), Scaling::None);
    let says = |result: Result<Scaling, GgufError>, says: &str| {
        let found = result.unwrap_err().to_string();
        assert!(found.contains(says), "{says}: {found}");
    };
    says(of(&[(kind, Some(text("yarn")))], &[]), "the key llama.rope.scaling.type is \"yarn\", which is not supported");
    says(of(&[(kind, Some(text("linear")))], &[]), "the key llama.rope.scaling.factor is missing");
    let factors = |dims: &'static [u64]| ("rope_freqs.weight", dims, 0, 32);
    // The data of the file are zeros.
    says(of(&[], &[factors(&[8])]), "the tensor rope_freqs.weight has the factor 0");
    says(of(&[], &[factors(&[4])]), "has type f32 and shape [4], expected f32 and [8]");
    let keys = llama(&[]);
    let mut bytes = file(&keys, &[("a", &[1], 0, 0), ("rope_freqs.weight", &[8], 0, 32)], 64);
    let at = bytes.len() - 32;
    bytes.truncate(at);
    bytes.extend([1.0f32, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0].iter().flat_map(|x| x.to_le_bytes()));
    let found = ModelConfig::from_gguf(&Gguf::parse(&bytes).unwrap()).unwrap();
    assert_eq!(found.rope_scaling, Scaling::Factors(vec![1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]));
}

#[test]
fn unsupported_and_missing_keys_are_named() {
    for (key, value, says) in [
        ("general.architecture", Some(text("gemma2")), "is \"gemma2\", expected llama or qwen3"),
        ("general.architecture", None, "the key general.architecture is missing"),
        ("llama.block_count", None, "the key llama.block_count is missing"),
        ("llama.block_count", Some(uint(4_000_000_000)), "expected fewer layers than tensors"),
        ("llama.embedding_length", Some(text("64")), "the key llama.embedding_length is \"64\", expected a size"),
        ("llama.feed_forward_length", Some(uint(0)), "the key llama.feed_forward_length is 0"),
        ("llama.attention.head_count_kv", Some(uint(3)), "is 3, expected a divisor of head_count 4"),
        ("llama.attention.key_length", Some(uint(15)), "is 15, expected an even number"),
        ("llama.attention.value_length", Some(uint(8)), "is 8, expected 16, the width of a head"),
        ("llama.rope.dimension_count", Some(uint(8)), "is 8, expected 16, the width of a head"),
        ("llama.attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon is missing"),
        ("llama.attention.layer_norm_rms_epsilon", Some(float(0.0)), "expected a number above 0"),
        ("llama.rope.freq_base", Some(float(f32::NAN)), "the key llama.rope.freq_base is NaN"),
        ("split.count", Some(uint(2)), "the key split.count is 2, which is not supported"),
        ("llama.expert_count", Some(uint(8)), "the key llama.expert_count is 8, which is not supported"),
        ("llama.attention.sliding_window", Some(uint(4096)), "is 4096, which is not supported"),
        ("llama.attention.causal", Some(value(7, &[0])), "llama.attention.causal is false, which is not supported"),
        ("tokenizer.ggml.eos_token_id", Some(text("end")), "the key tokenizer.ggml.eos_token_id is \"end\""),
    ] {
        let found = config(&llama(&[(key, value)]), &[]).unwrap_err().to_string();
        assert!(found.contains(says), "{key}: {found}");
    }
}
