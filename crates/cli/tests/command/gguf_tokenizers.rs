//! Tokenizers in the metadata of GGUF files.

use crate::gguf_files::{GgufBuilder, fixture};
use flash_sampling_cli::input::gguf::{GgufTokenizer, tokenizer};
use flash_sampling_models::gguf::{Gguf, Value};
use std::path::PathBuf;
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

fn of(file: &GgufBuilder) -> Result<GgufTokenizer, String> {
    let bytes = file.build();
    tokenizer(&Gguf::parse(&bytes).unwrap()).map_err(|error| error.to_string())
}

fn read(name: &str) -> GgufBuilder {
    GgufBuilder::of(&std::fs::read(fixture(name)).unwrap())
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, true).unwrap().get_ids().to_vec()
}

/// Texts of words, digits, white space and symbols of several scripts.
fn texts() -> Vec<String> {
    let parts = [
        "Once there was",
        " ",
        "  ",
        "\n",
        "\r\n\n",
        "\t",
        "a fox's",
        "I'M",
        "1234567",
        " 42",
        "...",
        " — naïve",
        "日本",
        "🦊",
        "_x",
    ];
    let line = |at: usize| (0..at % 9 + 1).map(|i| parts[(at * 7 + i * i * 5 + i * at) % parts.len()]).collect();
    (0..200).map(line).chain(["".into(), "<|endoftext|>".into(), "x<|endoftext|> y".into()]).collect()
}

#[test]
fn the_tokenizer_of_the_stories_is_that_of_its_tokenizer_json() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models/stories/tokenizer.json");
    let json = Tokenizer::from_file(path).unwrap();
    let found = of(&read("stories.gguf")).unwrap();
    assert_eq!((found.tokens, found.tokenizer.get_vocab(true)), (1681, json.get_vocab(true)));
    for text in texts() {
        let tokens = encode(&json, &text);
        assert_eq!(encode(&found.tokenizer, &text), tokens, "{text:?}");
        for skip_special in [false, true] {
            let [found, json] = [&found.tokenizer, &json].map(|t| t.decode(&tokens, skip_special).unwrap());
            assert_eq!(found, json, "{text:?}");
        }
    }
}

/// `tools/checkpoints/sentence_piece.py` made the file and, by `sentencepiece`, the expected tokens.
#[test]
fn scores_give_the_tokens_of_sentence_piece() {
    let json = std::fs::read(fixture("sentence_piece.json")).unwrap();
    let expected: Vec<serde_json::Value> = serde_json::from_slice(&json).unwrap();
    let file = read("sentence_piece.gguf");
    let [found, without] = [&file, &file.clone().key("tokenizer.ggml.add_bos_token", Value::Bool(false))]
        .map(|file| of(file).unwrap().tokenizer);
    let mut unlike = 0;
    let unprefixed = of(&file.key("tokenizer.ggml.add_space_prefix", Value::Bool(false))).unwrap().tokenizer;
    for expected in &expected {
        let text = expected["text"].as_str().unwrap();
        let tokens: Vec<u32> =
            expected["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
        assert_eq!(encode(&without, text), tokens, "{text:?}");
        assert_eq!(encode(&found, text), [&[1], &tokens[..]].concat(), "{text:?}");
        assert_eq!(found.decode(&tokens, true).unwrap(), text.replace('\u{2581}', " "));
        let tokens = encode(&unprefixed, text);
        assert_eq!(unprefixed.decode(&tokens, true).unwrap(), text.replace('\u{2581}', " "));
        unlike += usize::from(tokens != encode(&found, text));
    }
    assert!(expected.len() > 9 && unlike == expected.len() - 1, "{unlike}");
}

/// A byte-level tokenizer with some merges, and the other tokens of `more`.
fn byte_level(pre: &str, more: &[(&str, i32)]) -> GgufBuilder {
    let mut tokens: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
    tokens.sort();
    let mut types = vec![1; tokens.len()];
    let merges = ["1 2", "12 3", "123 4", "' M", "Ċ Ċ", "Ġ x"];
    tokens.extend(merges.map(|merge| merge.replace(' ', "")));
    types.resize(tokens.len(), 1);
    tokens.extend(more.iter().map(|(token, _)| token.to_string()));
    types.extend(more.iter().map(|(_, kind)| kind));
    GgufBuilder::default()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", pre)
        .texts("tokenizer.ggml.tokens", &tokens)
        .ints("tokenizer.ggml.token_type", &types)
        .texts("tokenizer.ggml.merges", &merges)
        .key("tokenizer.ggml.add_bos_token", Value::Bool(false))
}

#[test]
fn text_is_split_as_the_key_pre_says() {
    for (pre, expected) in [
        ("gpt-2", "1234|'|M|Ġx|Ġ|Ċ|Ċ|h|i"),
        ("default", "123|4|'|M|Ġx|Ġ|Ċ|Ċ|h|i"),
        ("smollm", "1|2|3|4|'|M|Ġx|Ġ|Ċ|Ċ|h|i"),
        ("llama-bpe", "123|4|'M|Ġx|Ġ|ĊĊ|hi"),
        ("qwen2", "1|2|3|4|'M|Ġx|Ġ|ĊĊ|h|i"),
    ] {
        // "hi" is a token that no merge forms.
        let found = of(&byte_level(pre, &[("hi", 1)])).unwrap().tokenizer;
        let tokens = found.encode("1234'M x \n\nhi", true).unwrap().get_tokens().join("|");
        assert_eq!(tokens, expected, "{pre}");
    }
}

#[test]
fn special_and_unused_tokens_keep_their_roles() {
    let more = [("<|turn|>", 3), ("  double  ", 4), ("[PAD1]", 5), ("<|end|>", 3), ("[PAD2]", 5), ("[PAD3]", 5)];
    let file = byte_level("qwen2", &more).uint("tokenizer.ggml.bos_token_id", 262);
    let begins = file.clone().key("tokenizer.ggml.add_bos_token", Value::Bool(true));
    let [found, begins] = [&file, &begins].map(|file| of(file).unwrap());
    assert_eq!(found.tokens, 256 + 6 + 4);
    let tokens = encode(&found.tokenizer, "a<|turn|>  double  <|end|>");
    assert_eq!(tokens[1..], [262, 263, 265]);
    assert_eq!(encode(&begins.tokenizer, "a<|turn|>  double  <|end|>"), [&[262], &tokens[..]].concat());
    assert_eq!(encode(&begins.tokenizer, ""), [262]);
    let decode = |skip| found.tokenizer.decode(&tokens, skip).unwrap();
    assert_eq!((decode(true), decode(false)), ("a  double  ".into(), "a<|turn|>  double  <|end|>".into()));
    // Qwen's normalizer composes characters; Llama 3 begins texts by default.
    assert_eq!(encode(&found.tokenizer, "e\u{301}"), encode(&found.tokenizer, "é"));
    let llama3 = byte_level("llama-bpe", &more).without("tokenizer.ggml.add_bos_token");
    assert_eq!(of(&llama3).unwrap_err(), "the key tokenizer.ggml.bos_token_id is missing");
    assert_eq!(encode(&of(&llama3.uint("tokenizer.ggml.bos_token_id", 262)).unwrap().tokenizer, ""), [262]);
}

#[test]
fn other_tokenizers_are_refused_by_name() {
    let (bytes, pieces) = (byte_level("gpt-2", &[]), read("sentence_piece.gguf"));
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    for (file, says) in [
        (bytes.clone().text(&key("model"), "bert"), "the key tokenizer.ggml.model is \"bert\", expected gpt2 or llama"),
        (bytes.clone().without(&key("model")), "the key tokenizer.ggml.model is missing"),
        (
            bytes.clone().text(&key("pre"), "tekken"),
            "the key tokenizer.ggml.pre is \"tekken\", expected default, gpt-2",
        ),
        (bytes.clone().without(&key("pre")), "the key tokenizer.ggml.pre is missing"),
        (bytes.clone().without(&key("merges")), "the key tokenizer.ggml.merges is missing"),
        (bytes.clone().texts(&key("merges"), &["a"]), "the key tokenizer.ggml.merges is an array of 1, expected pairs"),
        (bytes.clone().texts(&key("merges"), &["1 2", "1 9"]), "has merge 1, \"1\" and \"9\", but"),
        (bytes.clone().ints(&key("token_type"), &[1]), "token_type is an array of 1, expected 262, one for each token"),
        (
            bytes.clone().ints(&key("token_type"), &[9; 262]),
            "the key tokenizer.ggml.token_type is an array of 262, expected types",
        ),
        (bytes.clone().ints(&key("token_type"), &[5; 262]), "the key tokenizer.ggml.tokens"),
        (bytes.clone().texts(&key("tokens"), &["a", "b", "a"]).without(&key("token_type")), "has equal tokens 0 and 2"),
        (bytes.clone().texts::<&str>(&key("tokens"), &[]), "the key tokenizer.ggml.tokens is an array of 0"),
        (bytes.clone().key(&key("add_eos_token"), Value::Bool(true)), "add_eos_token is true, which is not supported"),
        (
            bytes.clone().key(&key("add_space_prefix"), Value::Bool(true)),
            "add_space_prefix is true, which is not supported",
        ),
        (bytes.clone().ints(&key("suppress_tokens"), &[3]), "suppress_tokens is an array of 1, which is not supported"),
        (pieces.clone().without(&key("scores")), "the key tokenizer.ggml.scores is missing"),
        (pieces.clone().uint(&key("unknown_token_id"), 700), "unknown_token_id is 700, expected one of 700 tokens"),
        (pieces.clone().without(&key("bos_token_id")), "the key tokenizer.ggml.bos_token_id is missing"),
    ] {
        let found = of(&file).unwrap_err();
        assert!(found.contains(says), "{says}: {found}");
    }
    // Distinct tokens of one length.
    let with_length = |length: usize| {
        let tokens: Vec<String> = (0..700).map(|at| format!("{at:0>length$}")).collect();
        of(&pieces.clone().texts(&key("tokens"), &tokens))
    };
    assert!(with_length(256).is_ok());
    let error = with_length(257).unwrap_err();
    assert!(error.contains("has a token of 257 bytes; at most 256 are possible"), "{error}");
    // All bytes are tokens, so no character is unknown.
    assert!(of(&pieces.without(&key("unknown_token_id"))).is_ok());
}
