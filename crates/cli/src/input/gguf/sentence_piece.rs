//! SentencePiece's BPE: of all neighbours whose concatenation is a token, those merge first whose token has the largest score.

use super::tokenizer::{Kind, Tokens, failed, list_of_tokens};
use flash_sampling_models::gguf::{Gguf, GgufError, Value};
use tokenizers::Tokenizer;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence};

const SCORES: &str = "tokenizer.ggml.scores";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
/// Stands for a space in tokens.
const SPACE: &str = "\u{2581}";
/// The maximum length of a normal token in bytes. The time for the splits of a token is quadratic in its length.
/// Without its merges a longer token would change the tokens of a text, so it is an error. SentencePiece's default is 16
/// characters, at most 64 bytes.
const MAX_PIECE: usize = 256;

/// All splits of normal tokens into two normal tokens, with the largest score first.
fn merges(file: &Gguf<'_>, tokens: &Tokens<'_>) -> Result<Vec<(String, String)>, GgufError> {
    let score = |value: Value<'_>| value.as_f64();
    let scores = list_of_tokens(file, SCORES, tokens.count, "numbers", score)?;
    let is_normal = |text: &str| tokens.ids.get(text).is_some_and(|id| tokens.kinds[*id as usize] == Kind::Normal);
    let mut merges = Vec::new();
    for (text, score) in tokens.texts.iter().zip(scores) {
        if !is_normal(text) {
            continue;
        }
        if text.len() > MAX_PIECE {
            let reason = format!("has a token of {} bytes; at most {MAX_PIECE} are possible", text.len());
            return Err(GgufError::Invalid { part: "the key tokenizer.ggml.tokens".into(), reason });
        }
        let splits = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        merges.extend(splits.filter(|(a, b)| is_normal(a) && is_normal(b)).map(|(a, b)| (score, a, b)));
    }
    // A stable sort: of equal scores the token with the lower id comes first.
    merges.sort_by(|(a, ..), (b, ..)| b.total_cmp(a));
    Ok(merges.into_iter().map(|(_, a, b)| (a.into(), b.into())).collect())
}

pub(super) fn tokenizer(file: &Gguf<'_>, tokens: &Tokens<'_>, prefix: bool) -> Result<Tokenizer, GgufError> {
    let mut bpe = BPE::builder()
        .vocab_and_merges::<tokenizers::models::bpe::Vocab>(tokens.vocabulary(), merges(file, tokens)?)
        .fuse_unk(true)
        .byte_fallback(true);
    match tokens.special(file, UNKNOWN)? {
        Some(unknown) => bpe = bpe.unk_token(tokens.texts[unknown as usize].into()),
        // Without all bytes, some characters would vanish.
        None if (0..=255).all(|byte| tokens.ids.contains_key(format!("<0x{byte:02X}>").as_str())) => {}
        None => return Err(GgufError::MissingKey(UNKNOWN.into())),
    }
    let mut tokenizer = Tokenizer::new(bpe.build().map_err(|error| failed(SCORES, error))?);
    let failed = |error| failed("tokenizer.ggml.model", error);
    let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
    let mut decoders: Vec<DecoderWrapper> = Vec::new();
    if prefix {
        normalizers.push(Prepend::new(SPACE.into()).into());
    }
    normalizers.push(Replace::new(" ", SPACE).map_err(failed)?.into());
    decoders.push(Replace::new(SPACE, " ").map_err(failed)?.into());
    decoders.extend([ByteFallback::new().into(), Fuse::new().into()]);
    if prefix {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    tokenizer.with_normalizer(Some(Sequence::new(normalizers))).map_err(failed)?;
    tokenizer.with_decoder(Some(tokenizers::decoders::sequence::Sequence::new(decoders)));
    Ok(tokenizer)
}
