//! Byte-level BPE.

use super::tokenizer::{Tokens, failed, list};
use flash_sampling_models::gguf::{Gguf, GgufError, Value};
use tokenizers::Tokenizer;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split as Splitter, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

const PRE: &str = "tokenizer.ggml.pre";
const MERGES: &str = "tokenizer.ggml.merges";

/// How text is split before merges, by `tokenizer.ggml.pre`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Split {
    /// llama.cpp's fallback.
    Default,
    Gpt2,
    Llama3,
    Qwen2,
    SmolLm,
}

/// GPT-2's pattern, as in the other patterns without its possessive forms.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl Split {
    pub(super) fn read(file: &Gguf<'_>) -> Result<Self, GgufError> {
        let split = |value: Value<'_>| {
            Some(match value.as_str()? {
                "default" => Split::Default,
                "gpt-2" => Split::Gpt2,
                "llama-bpe" | "llama3" | "llama-v3" => Split::Llama3,
                "qwen2" | "deepseek-r1-qwen" => Split::Qwen2,
                "smollm" => Split::SmolLm,
                _ => return None,
            })
        };
        file.require(PRE, "default, gpt-2, llama-bpe, qwen2 or smollm", split)
    }

    /// The patterns, each applied to the pieces of those before it.
    fn patterns(self) -> &'static [&'static str] {
        match self {
            Split::Default => &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
            Split::Gpt2 => &[GPT2],
            Split::Llama3 => &[LLAMA3],
            Split::Qwen2 => &[QWEN2],
            Split::SmolLm => &[r"\p{N}", GPT2],
        }
    }
}

/// The pairs of `tokenizer.ggml.merges`, which separates them by a space. Both parts and the result are tokens.
fn merges(file: &Gguf<'_>, tokens: &Tokens<'_>) -> Result<Vec<(String, String)>, GgufError> {
    let read = |value: Value<'_>| -> Option<(String, String)> {
        let text = value.as_str()?;
        let (at, _) = text.char_indices().skip(1).find(|(_, c)| *c == ' ')?;
        Some((text[..at].into(), text[at + 1..].into()))
    };
    let merges = list(file, MERGES, "pairs of tokens separated by a space", read)?;
    let merges = merges.ok_or_else(|| GgufError::MissingKey(MERGES.into()))?;
    let is_token = |text: &str| tokens.ids.contains_key(text);
    match merges.iter().position(|(a, b)| !(is_token(a) && is_token(b) && is_token(&format!("{a}{b}")))) {
        Some(at) => {
            let (a, b) = &merges[at];
            let reason = format!("has merge {at}, {a:?} and {b:?}, but they or their merge are no tokens");
            Err(GgufError::Invalid { part: format!("the key {MERGES}"), reason })
        }
        None => Ok(merges),
    }
}

pub(super) fn tokenizer(file: &Gguf<'_>, tokens: &Tokens<'_>, split: Split) -> Result<Tokenizer, GgufError> {
    let bpe = BPE::builder()
        .vocab_and_merges::<tokenizers::models::bpe::Vocab>(tokens.vocabulary(), merges(file, tokens)?)
        // Llama 3 takes a piece that is a token as a whole.
        .ignore_merges(split == Split::Llama3);
    let mut tokenizer = Tokenizer::new(bpe.build().map_err(|error| failed(MERGES, error))?);
    let splitter = |pattern: &&str| -> Result<PreTokenizerWrapper, GgufError> {
        let pattern = SplitPattern::Regex(pattern.to_string());
        let splitter = Splitter::new(pattern, SplitDelimiterBehavior::Isolated, false);
        Ok(splitter.map_err(|error| failed(PRE, error))?.into())
    };
    let mut steps = split.patterns().iter().map(splitter).collect::<Result<Vec<_>, _>>()?;
    steps.push(ByteLevel::new(false, true, false).into());
    tokenizer.with_pre_tokenizer(Some(Sequence::new(steps)));
    tokenizer.with_decoder(Some(ByteLevel::new(false, true, false)));
    if split == Split::Qwen2 {
        // As in Qwen's tokenizer.json.
        tokenizer.with_normalizer(Some(NFC)).map_err(|error| failed(PRE, error))?;
    }
    Ok(tokenizer)
}
