//! The LM head: the weight, its tokens, and the transforms of the model.

use crate::backend::math;
use crate::error::HeadError;
use crate::matrix::Matrix;
use crate::shadow::Shadow;
use core::ops::Range;

/// An LM head or a shard of it: `logits = scale * soft_cap(hidden x weight^T + bias)`.
///
/// The order is vLLM's: the bias of the linear layer, then the soft-cap `cap * tanh(l / cap)`, then the scale.
#[derive(Clone, Copy, Debug)]
pub struct Head<'w> {
    weight: Matrix<'w>,
    vocab_start: u32,
    vocab_size: u32,
    bias: Option<&'w [f32]>,
    soft_cap: Option<f32>,
    scale: f32,
    shadow: Option<Shadow<'w>>,
}

impl<'w> Head<'w> {
    /// The head of a whole vocabulary: weight `[vocab, hidden]`, row `i` is token `i`.
    ///
    /// # Errors
    /// [`HeadError::Vocab`] when the weight has no rows or more than 2^32 - 2.
    pub fn new(weight: Matrix<'w>) -> Result<Self, HeadError> {
        Head::shard(weight, 0, weight.rows())
    }

    /// A shard: row `i` of the weight is token `vocab_start + i` of a vocabulary of `vocab_size` tokens.
    ///
    /// Rows from token `vocab_size` on are padding, which is never sampled. A shard without other rows has no mass.
    ///
    /// # Errors
    /// [`HeadError::Vocab`] when `vocab_size` is zero or a token id would exceed 2^32 - 2.
    pub fn shard(weight: Matrix<'w>, vocab_start: usize, vocab_size: usize) -> Result<Self, HeadError> {
        let vocab_end = vocab_start.saturating_add(weight.rows());
        // `Winner::NONE` has the largest id.
        let limit = u32::MAX as usize - 1;
        if vocab_size == 0 || vocab_end > limit || vocab_size > limit {
            return Err(HeadError::Vocab { vocab_size, vocab_start, vocab_end });
        }
        Ok(Head {
            weight,
            vocab_start: vocab_start as u32,
            vocab_size: vocab_size as u32,
            bias: None,
            soft_cap: None,
            scale: 1.0,
            shadow: None,
        })
    }

    /// Uses only the first `vocab_size` tokens.
    ///
    /// Many heads are padded to a round number of rows, and the padding's logits are 0, not -inf.
    ///
    /// # Errors
    /// [`HeadError::VocabSize`] when `vocab_size` is zero or larger than the vocabulary.
    pub fn with_vocab_size(mut self, vocab_size: usize) -> Result<Self, HeadError> {
        let most = self.vocab_size as usize;
        if vocab_size == 0 || vocab_size > most {
            return Err(HeadError::VocabSize { vocab_size, most });
        }
        self.vocab_size = vocab_size as u32;
        Ok(self)
    }

    /// Adds a bias per weight row, in nats before soft-cap and scale. `-inf` removes a token.
    ///
    /// # Errors
    /// [`HeadError::BiasLength`] or [`HeadError::BiasValue`].
    pub fn with_bias(mut self, bias: &'w [f32]) -> Result<Self, HeadError> {
        if bias.len() != self.weight.rows() {
            return Err(HeadError::BiasLength { found: bias.len(), expected: self.weight.rows() });
        }
        if let Some(row) = bias.iter().position(|b| b.is_nan() || *b == f32::INFINITY) {
            return Err(HeadError::BiasValue { row });
        }
        self.bias = Some(bias);
        Ok(self)
    }

    /// Caps the absolute values of the logits at `cap`: `cap * tanh(l / cap)`, as Gemma 2 does.
    ///
    /// # Errors
    /// [`HeadError::Factor`] when `cap` is not finite and positive.
    pub fn with_soft_cap(mut self, cap: f32) -> Result<Self, HeadError> {
        if !(cap > 0.0 && cap.is_finite()) {
            return Err(HeadError::Factor { what: "soft_cap", value: cap.into() });
        }
        self.soft_cap = Some(cap);
        Ok(self)
    }

    /// Multiplies the logits, as Cohere and Granite do.
    ///
    /// # Errors
    /// [`HeadError::Factor`] when `scale` is not finite and positive.
    pub fn with_scale(mut self, scale: f32) -> Result<Self, HeadError> {
        if !(scale > 0.0 && scale.is_finite()) {
            return Err(HeadError::Factor { what: "scale", value: scale.into() });
        }
        self.scale = scale;
        Ok(self)
    }

    /// Adds a shadow of the weight. Samplers that can use a shadow make the same draws in less time, and other samplers
    /// ignore it.
    ///
    /// The draws are exact only if the shadow is of this weight.
    ///
    /// # Errors
    /// [`HeadError::ShadowShape`] when the shadow has other rows or columns; [`HeadError::ShadowType`] for a quantised
    /// weight.
    pub fn with_shadow(mut self, shadow: Shadow<'w>) -> Result<Self, HeadError> {
        let (of_shadow, weight) = ([shadow.rows(), shadow.cols()], [self.weight.rows(), self.weight.cols()]);
        if of_shadow != weight {
            return Err(HeadError::ShadowShape { shadow: of_shadow, weight });
        }
        if !self.weight.dtype().is_float() {
            return Err(HeadError::ShadowType { dtype: self.weight.dtype() });
        }
        self.shadow = Some(shadow);
        Ok(self)
    }

    /// The weight, `[rows, hidden]`.
    pub fn weight(&self) -> Matrix<'w> {
        self.weight
    }

    /// Size of the whole vocabulary; this head may be a shard of it.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// Hidden size.
    pub fn hidden(&self) -> usize {
        self.weight.cols()
    }

    /// The global ids of the tokens that this head can draw: its rows without the padding.
    pub fn tokens(&self) -> Range<u32> {
        let end = (self.vocab_start + self.weight.rows() as u32).min(self.vocab_size);
        self.vocab_start..end.max(self.vocab_start)
    }

    /// The weight row of a token of [`Head::tokens`].
    pub fn weight_row(&self, token: u32) -> usize {
        (token - self.vocab_start) as usize
    }

    /// The bias per weight row.
    pub fn bias(&self) -> Option<&'w [f32]> {
        self.bias
    }

    /// The soft-cap.
    pub fn soft_cap(&self) -> Option<f32> {
        self.soft_cap
    }

    /// The shadow of the weight.
    pub fn shadow(&self) -> Option<Shadow<'w>> {
        self.shadow
    }

    /// The scale.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// A shard of this head: the tokens `range` of [`Head::tokens`].
    ///
    /// # Panics
    /// If the range exceeds these tokens.
    pub fn slice(&self, range: Range<u32>) -> Head<'w> {
        let rows = self.weight_row(range.start)..self.weight_row(range.end);
        Head {
            weight: self.weight.row_range(rows.clone()),
            vocab_start: range.start,
            bias: self.bias.map(|b| &b[rows.clone()]),
            shadow: self.shadow.map(|shadow| shadow.row_range(rows)),
            ..*self
        }
    }

    /// Splits the head into shards that begin at the tokens `starts`.
    ///
    /// `starts` ascends from this head's first token; equal neighbours make empty shards. The draws do not depend on
    /// the starts. With multiples of 64, no shard begins with a partial noise block or a partial tile of the kernels.
    ///
    /// # Panics
    /// If the starts descend or leave the head.
    pub fn split(&self, starts: &[u32]) -> Vec<Head<'w>> {
        let ends = starts.iter().skip(1).copied().chain([self.tokens().end]);
        starts.iter().zip(ends).map(|(&start, end)| self.slice(start..end)).collect()
    }

    /// Turns dot products into raw logits: bias, soft-cap, scale. `dots[i]` belongs to token `first + i`.
    #[inline(always)]
    pub fn transform(&self, first: u32, dots: &mut [f32]) {
        if let Some(bias) = self.bias {
            for (l, b) in dots.iter_mut().zip(&bias[self.weight_row(first)..]) {
                *l += b;
            }
        }
        if let Some(cap) = self.soft_cap {
            for l in dots.iter_mut() {
                *l = if l.is_finite() { cap * math::tanh(*l / cap) } else { *l };
            }
        }
        if self.scale != 1.0 {
            for l in dots {
                *l *= self.scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: [f32; 12] = [0.0; 12];

    fn weight() -> Matrix<'static> {
        Matrix::new(&DATA, 6, 2).unwrap()
    }

    #[test]
    fn padding_and_shards_have_the_right_tokens() {
        let head = Head::new(weight()).unwrap().with_vocab_size(5).unwrap();
        assert_eq!(head.tokens(), 0..5);
        let shards = head.split(&[0, 2, 2]);
        assert_eq!(shards.iter().map(Head::tokens).collect::<Vec<_>>(), [0..2, 2..2, 2..5]);
        let padding = Head::shard(weight(), 8, 7).unwrap();
        assert_eq!(padding.tokens(), 8..8);
        assert_eq!(padding.slice(8..8).weight().rows(), 0);
        assert!(Head::shard(weight(), 0, 0).is_err());
        assert!(Head::shard(weight(), u32::MAX as usize - 3, 9).is_err());
        assert!(head.with_vocab_size(6).is_err());
    }

    #[test]
    fn errors_of_a_vocabulary_say_which_and_which_tokens() {
        let head = Head::new(weight()).unwrap().with_vocab_size(5).unwrap();
        for wrong in [0, 6] {
            let says = format!("vocab_size is {wrong}, but the head's vocabulary has 5 tokens: it must be 1 to 5");
            assert_eq!(head.with_vocab_size(wrong).unwrap_err().to_string(), says);
        }
        let says = |start, vocab_size| Head::shard(weight(), start, vocab_size).unwrap_err().to_string();
        assert_eq!(says(0, 0), "a vocabulary of 0 tokens has none to draw");
        assert_eq!(
            says(4_294_967_290, 9),
            "the weight's rows are tokens 4294967290..4294967296, but must end at 4294967294 at most"
        );
        assert_eq!(says(0, 4_294_967_295), "a vocabulary of 4294967295 tokens is too large: 4294967294 are the most");
    }

    #[test]
    fn the_order_is_bias_cap_scale() {
        let bias = [1.0, 2.0, 3.0, 4.0, 5.0, f32::NEG_INFINITY];
        let head = Head::new(weight()).unwrap().with_bias(&bias).unwrap();
        let head = head.with_soft_cap(2.0).unwrap().with_scale(3.0).unwrap();
        let mut dots = [1.0f32, 1.0, 0.0];
        head.transform(3, &mut dots);
        let want = |x: f32| 3.0 * (2.0 * (x / 2.0).tanh());
        assert!((dots[0] - want(5.0)).abs() < 1e-5 && (dots[1] - want(6.0)).abs() < 1e-5);
        assert_eq!(dots[2], f32::NEG_INFINITY);
    }

    #[test]
    fn bad_factors_are_refused() {
        let head = Head::new(weight()).unwrap();
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(head.with_scale(bad).is_err() && head.with_soft_cap(bad).is_err());
        }
        assert!(matches!(head.with_bias(&[0.0; 5]), Err(HeadError::BiasLength { found: 5, expected: 6 })));
        assert!(matches!(head.with_bias(&[f32::NAN; 6]), Err(HeadError::BiasValue { row: 0 })));
    }
}
