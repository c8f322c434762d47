//! The LM head of a model: its tensors, and its parameters in the metadata.

use super::{Gguf, GgufError, Value};

/// The weight of the head, and the embedding. A model without the first tensor uses the embedding as its head.
const HEADS: [&str; 2] = ["output.weight", "token_embd.weight"];
/// The bias of the head.
pub const HEAD_BIAS: &str = "output.bias";

/// The parameters of the head; `None` for a missing key.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GgufHead {
    /// Tokens of the vocabulary; further rows of the weight are padding.
    pub vocab_size: Option<usize>,
    /// `cap` of `cap * tanh(logit / cap)`, finite and above 0.
    pub soft_cap: Option<f32>,
    /// The factor of the logits, from the key `logit_scale`.
    pub scale: Option<Scale>,
}

/// The factor of the logits, from a key of a model's configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// A factor, finite and above 0.
    Factor(f32),
    /// A value whose meaning in this architecture is unknown.
    Unclear,
}

impl Gguf<'_> {
    /// The name of the head's weight: `output.weight`, or `token_embd.weight` if the head is the embedding.
    ///
    /// # Errors
    /// [`GgufError::MissingTensor`]: the file has neither of the two tensors.
    pub fn head_name(&self) -> Result<&'static str, GgufError> {
        let name = HEADS.into_iter().find(|name| self.has(name));
        name.ok_or_else(|| GgufError::MissingTensor(HEADS.join(" and no tensor ")))
    }

    /// The parameters of the head, under the keys of the architecture.
    ///
    /// # Errors
    /// The file has no `general.architecture`, or a parameter is not a valid number.
    pub fn head(&self) -> Result<GgufHead, GgufError> {
        let architecture = self.architecture()?;
        let key = |name: &str| format!("{architecture}.{name}");
        let size = |value: Value<'_>| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
        let positive = |value: Value<'_>| value.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && *x > 0.0);
        let scale = self.read(&key("logit_scale"), "a number above 0", positive)?.map(|scale| match architecture {
            "command-r" | "cohere2" => Scale::Factor(scale),
            "granite" | "granitemoe" | "granitehybrid" => Scale::Factor(1.0 / scale),
            _ => Scale::Unclear,
        });
        Ok(GgufHead {
            vocab_size: self.read(&key("vocab_size"), "a size", size)?,
            soft_cap: self.read(&key("final_logit_softcapping"), "a number above 0", positive)?,
            scale,
        })
    }
}
