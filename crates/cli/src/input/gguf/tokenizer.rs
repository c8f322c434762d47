//! The tokenizer in the metadata of a GGUF file, as the crate `tokenizers` has it.
//!
//! | `tokenizer.ggml.model` | tokenizer |
//! | --- | --- |
//! | `gpt2` | byte-level BPE with the merges of the file; `tokenizer.ggml.pre` names how text is split before |
//! | `llama` | SentencePiece's BPE: the scores of the tokens give the merges, and bytes replace unknown characters |

use super::byte_level::{self, Split};
use super::sentence_piece;
use flash_sampling_models::gguf::{Gguf, GgufError, Value};
use std::collections::HashMap;
use tokenizers::processors::template::{SpecialToken, TemplateProcessing};
use tokenizers::{AddedToken, Tokenizer};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const BOS: &str = "tokenizer.ggml.bos_token_id";

/// A tokenizer without the unused tokens at the end of its list, which are padding.
#[derive(Debug)]
pub struct GgufTokenizer {
    /// The tokenizer; encoding adds the beginning-of-sequence token if the file says so.
    pub tokenizer: Tokenizer,
    /// Number of tokens.
    pub tokens: usize,
}

/// The type of a token, by llama.cpp's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// The tokens of a file, without the unused ones at the end.
pub(super) struct Tokens<'a> {
    /// Tokens of the file.
    pub(super) count: usize,
    pub(super) texts: Vec<&'a str>,
    pub(super) kinds: Vec<Kind>,
    pub(super) ids: HashMap<&'a str, u32>,
}

/// An error of the crate `tokenizers` about a key.
pub(super) fn failed(key: &str, error: impl std::fmt::Display) -> GgufError {
    GgufError::Invalid { part: format!("the key {key}"), reason: format!("has no valid tokenizer: {error}") }
}

fn key_is(key: &str, found: impl std::fmt::Display, expected: &str) -> GgufError {
    GgufError::Key { key: key.into(), found: found.to_string(), expected: expected.into() }
}

/// The list of a key, if every element is what `read` reads.
pub(super) fn list<'a, T>(
    file: &Gguf<'a>,
    key: &str,
    expected: &str,
    read: impl Fn(Value<'a>) -> Option<T>,
) -> Result<Option<Vec<T>>, GgufError> {
    file.read(key, expected, |value| value.as_array()?.iter().map(read).collect())
}

/// A list that must exist, with one element per token.
pub(super) fn list_of_tokens<'a, T>(
    file: &Gguf<'a>,
    key: &str,
    tokens: usize,
    expected: &str,
    read: impl Fn(Value<'a>) -> Option<T>,
) -> Result<Vec<T>, GgufError> {
    let found = list(file, key, expected, read)?.ok_or_else(|| GgufError::MissingKey(key.into()))?;
    match found.len() == tokens {
        true => Ok(found),
        false => Err(key_is(key, format!("an array of {}", found.len()), &format!("{tokens}, one for each token"))),
    }
}

impl<'a> Tokens<'a> {
    fn read(file: &Gguf<'a>) -> Result<Self, GgufError> {
        let texts = list(file, TOKENS, "texts in UTF-8", |value| value.as_str())?;
        let texts = texts.ok_or_else(|| GgufError::MissingKey(TOKENS.into()))?;
        if texts.is_empty() || u32::try_from(texts.len()).is_err() {
            return Err(key_is(TOKENS, format!("an array of {}", texts.len()), "1 to 2^32 - 1 tokens"));
        }
        let kind = |value: Value<'_>| {
            Some(match value.as_u64()? {
                0 | 1 => Kind::Normal,
                2 => Kind::Unknown,
                3 => Kind::Control,
                4 => Kind::UserDefined,
                5 => Kind::Unused,
                6 => Kind::Byte,
                _ => return None,
            })
        };
        let kinds = match file.value(TYPES) {
            Some(_) => list_of_tokens(file, TYPES, texts.len(), "types from 0 to 6", kind)?,
            None => vec![Kind::Normal; texts.len()],
        };
        let (count, mut texts, mut kinds) = (texts.len(), texts, kinds);
        let used = kinds.iter().rposition(|kind| *kind != Kind::Unused).map_or(0, |last| last + 1);
        if used == 0 {
            return Err(key_is(TOKENS, format!("an array of {count} unused tokens"), "a token in use"));
        }
        texts.truncate(used);
        kinds.truncate(used);
        let mut ids = HashMap::with_capacity(texts.len());
        for (id, text) in (0..).zip(&texts) {
            if let Some(other) = ids.insert(*text, id) {
                let reason = format!("has equal tokens {other} and {id}");
                return Err(GgufError::Invalid { part: format!("the key {TOKENS}"), reason });
            }
        }
        Ok(Tokens { texts, kinds, ids, count })
    }

    /// The tokens with their ids.
    pub(super) fn vocabulary<V: FromIterator<(String, u32)>>(&self) -> V {
        (0..).zip(&self.texts).map(|(id, text)| (text.to_string(), id)).collect()
    }

    /// The token of a key.
    pub(super) fn special(&self, file: &Gguf<'_>, key: &str) -> Result<Option<u32>, GgufError> {
        let tokens = self.texts.len();
        let read = |value: Value<'_>| value.as_u64().filter(|id| *id < tokens as u64).map(|id| id as u32);
        file.read(key, &format!("one of {tokens} tokens"), read)
    }
}

/// Builds the tokenizer.
///
/// # Errors
/// [`GgufError`], which names the key: another kind of tokenizer, missing or contradictory keys.
pub fn tokenizer(file: &Gguf<'_>) -> Result<GgufTokenizer, GgufError> {
    let model = |value: Value<'_>| value.as_str().filter(|model| ["gpt2", "llama"].contains(model)).map(str::to_owned);
    let model = file.require("tokenizer.ggml.model", "gpt2 or llama", model)?;
    for key in ["add_eos_token", "add_sep_token", "suppress_tokens"].map(|key| format!("tokenizer.ggml.{key}")) {
        if let Some(value) = file.value(&key).filter(|value| value.as_bool() != Some(false)) {
            return Err(GgufError::Unsupported { key, found: value.to_string() });
        }
    }
    let tokens = Tokens::read(file)?;
    let flag = |key: &str, otherwise: bool| -> Result<bool, GgufError> {
        let value = file.read(&format!("tokenizer.ggml.{key}"), "true or false", |value| value.as_bool())?;
        Ok(value.unwrap_or(otherwise))
    };
    let (mut tokenizer, begins) = match model.as_str() {
        "gpt2" => {
            if flag("add_space_prefix", false)? {
                let key = "tokenizer.ggml.add_space_prefix".into();
                return Err(GgufError::Unsupported { key, found: "true".into() });
            }
            let split = Split::read(file)?;
            (byte_level::tokenizer(file, &tokens, split)?, flag("add_bos_token", split == Split::Llama3)?)
        }
        _ => {
            let prefix = flag("add_space_prefix", true)?;
            (sentence_piece::tokenizer(file, &tokens, prefix)?, flag("add_bos_token", true)?)
        }
    };
    let special = tokens.texts.iter().zip(&tokens.kinds).filter_map(|(text, kind)| match kind {
        Kind::Control | Kind::Unknown => Some(AddedToken::from(*text, true).normalized(false)),
        Kind::UserDefined => Some(AddedToken::from(*text, false).normalized(false)),
        Kind::Normal | Kind::Unused | Kind::Byte => None,
    });
    tokenizer.add_tokens(special).map_err(|error| failed(TYPES, error))?;
    if begins {
        let bos = tokens.special(file, BOS)?.ok_or_else(|| GgufError::MissingKey(BOS.into()))?;
        let text = tokens.texts[bos as usize].to_owned();
        let template = SpecialToken::new("bos".into(), vec![bos], vec![text]).and_then(|bos| {
            let mut builder = TemplateProcessing::builder();
            builder.try_single("bos $A")?.special_tokens(vec![bos]);
            Ok(builder.build()?)
        });
        tokenizer.with_post_processor(Some(template.map_err(|error| failed(BOS, error))?));
    }
    Ok(GgufTokenizer { tokenizer, tokens: tokens.texts.len() })
}
