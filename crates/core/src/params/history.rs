//! The tokens of a sequence and their counts, for penalties and minimum lengths.

use crate::backend::digest::{of_list, of_words};
use core::ops::Range;

/// The occurrences of a token in a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occurrence {
    /// The token.
    pub token: u32,
    /// Whether the token is in the prompt.
    pub in_prompt: bool,
    /// How often the token was generated.
    pub output_count: u32,
}

/// A sequence so far: the prompt, and the tokens generated after it.
///
/// The caller keeps one history per sequence and [pushes](History::push) each drawn token, so a step does not count the
/// whole sequence. Tokens beyond the vocabulary, such as placeholders of images, are allowed and change no logit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    tokens: Vec<u32>,
    prompt_len: usize,
    /// Ascending by token.
    counts: Vec<Occurrence>,
    digest: u64,
}

impl History {
    /// A sequence with a prompt and no generated tokens.
    pub fn new(prompt: &[u32]) -> Self {
        let mut sorted = prompt.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let counts = sorted.into_iter().map(|token| Occurrence { token, in_prompt: true, output_count: 0 }).collect();
        History { tokens: prompt.to_vec(), prompt_len: prompt.len(), counts, digest: of_list(prompt) }
    }

    /// Appends a generated token.
    pub fn push(&mut self, token: u32) {
        self.digest = of_words([self.digest, u64::from(token)]);
        self.tokens.push(token);
        match self.counts.binary_search_by_key(&token, |o| o.token) {
            Ok(at) => self.counts[at].output_count += 1,
            Err(at) => self.counts.insert(at, Occurrence { token, in_prompt: false, output_count: 1 }),
        }
    }

    /// The prompt's tokens.
    pub fn prompt(&self) -> &[u32] {
        &self.tokens[..self.prompt_len]
    }

    /// The generated tokens.
    pub fn output(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// All tokens: the prompt, then the generated tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// A digest of the prompt and of the generated tokens.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Each distinct token of the sequence, ascending.
    pub fn occurrences(&self) -> &[Occurrence] {
        &self.counts
    }

    /// The [occurrences](History::occurrences) of tokens in a range.
    pub(crate) fn occurrences_within(&self, tokens: &Range<u32>) -> &[Occurrence] {
        let before = |end: u32| self.counts.partition_point(|o| o.token < end);
        &self.counts[before(tokens.start)..before(tokens.end)]
    }
}

impl Default for History {
    fn default() -> Self {
        History::new(&[])
    }
}

impl Extend<u32> for History {
    fn extend<I: IntoIterator<Item = u32>>(&mut self, tokens: I) {
        tokens.into_iter().for_each(|token| self.push(token));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_counts_are_those_of_the_tokens(prompt in prop::collection::vec(0u32..20, 0..40),
                                              output in prop::collection::vec(0u32..20, 0..40)) {
            let mut history = History::new(&prompt);
            history.extend(output.iter().copied());
            prop_assert_eq!(history.prompt(), &prompt[..]);
            prop_assert_eq!(history.output(), &output[..]);
            let count = |of: &[u32], token| of.iter().filter(|&&t| t == token).count();
            let want: Vec<_> = (0..20).filter(|t| count(history.tokens(), *t) > 0).map(|token| Occurrence {
                token, in_prompt: count(&prompt, token) > 0, output_count: count(&output, token) as u32,
            }).collect();
            prop_assert_eq!(history.occurrences(), &want[..]);
        }
    }
}
