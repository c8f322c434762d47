//! The layers of a model.

use crate::attention::{Scores, View, attend};
use crate::cache::Cache;
use crate::config::{Family, ModelConfig};
use crate::error::ModelError;
use crate::layer::{Layer, Linear, Norm, tensor};
use crate::rotary::Rotary;
use flash_sampling::{Isa, Matrix};
use rayon::prelude::*;

/// Multiply-adds of attention below which one thread is faster than several.
const ALONE: usize = 1 << 16;

/// A model over borrowed weights: takes tokens, returns hidden states `[tokens, hidden]` after the last norm. The LM
/// head is not part of it.
#[derive(Debug)]
pub struct Model<'w> {
    config: ModelConfig,
    embedding: Matrix<'w>,
    /// The factor of the embedding.
    embedding_scale: f32,
    layers: Vec<Layer<'w>>,
    norm: Norm,
    rotary: Rotary,
    isa: Option<Isa>,
}

/// The next tokens of one sequence.
#[derive(Debug)]
pub struct Run<'a> {
    /// The sequence so far; the tokens are added to it.
    pub cache: &'a mut Cache,
    /// The next tokens, at least one: the whole prompt, or the last drawn token.
    pub tokens: &'a [u32],
}

impl<'w> Model<'w> {
    /// A model over the weights of a checkpoint under the names of Hugging Face.
    ///
    /// `tensors` returns a tensor as a matrix `[rows, cols]`, a vector as one row, and `None` for a missing name. Without
    /// `isa`, the model uses the fastest instruction set.
    ///
    /// # Errors
    /// [`ModelError::Missing`], [`ModelError::Shape`], [`ModelError::Cpu`] for an unavailable instruction set, and the
    /// errors of `tensors`.
    pub fn new(
        config: ModelConfig,
        isa: Option<Isa>,
        mut tensors: impl FnMut(&str) -> Result<Option<Matrix<'w>>, ModelError>,
    ) -> Result<Self, ModelError> {
        if let Some(isa) = isa.filter(|isa| !isa.is_available()) {
            return Err(flash_sampling::CpuError::IsaUnavailable { isa, available: Isa::available() }.into());
        }
        let name = "model.embed_tokens.weight";
        let embedding = tensors(name)?.ok_or_else(|| ModelError::Missing(name.into()))?;
        let embedding = tensor(&mut |_: &str| Ok(Some(embedding)), name, [embedding.rows(), config.hidden])?;
        let layer = |at: usize| Layer::new(&config, &format!("model.layers.{at}."), &mut tensors);
        let layers = (0..config.layers).map(layer).collect::<Result<_, _>>()?;
        let norm = Norm::new(&config, &mut tensors, "model.norm.weight", config.hidden)?;
        let rotary = Rotary::new(config.head_dim, config.rope_theta, &config.rope_scaling, config.rope_pairing);
        let embedding_scale = match config.family {
            Family::Gemma2 => (config.hidden as f64).sqrt() as f32,
            Family::Llama | Family::Qwen3 => 1.0,
        };
        Ok(Model { config, embedding, embedding_scale, layers, norm, rotary, isa })
    }

    /// Sizes and constants.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Rows of the embedding: inputs must be below it.
    pub fn vocab_size(&self) -> usize {
        self.embedding.rows()
    }

    /// Runs the tokens of several sequences through all layers, on rayon's current threads.
    ///
    /// The result is `[tokens, hidden]`, with the tokens of the first run first.
    ///
    /// # Errors
    /// [`ModelError::Token`] and [`ModelError::TooLong`], before any work.
    pub fn forward(&self, runs: &mut [Run<'_>]) -> Result<Vec<f32>, ModelError> {
        self.check(runs)?;
        // On a thread of the pool, a matmul does not wait for the pool to take it.
        rayon::scope(|_| self.run_layers(runs))
    }

    fn run_layers(&self, runs: &mut [Run<'_>]) -> Result<Vec<f32>, ModelError> {
        let hidden = self.config.hidden;
        let rows: Vec<Place> = places(runs);
        let turns: Vec<_> = rows.iter().map(|row| self.rotary.at(row.position)).collect();
        let mut x = vec![0.0; rows.len() * hidden];
        let tokens = runs.iter().flat_map(|run| run.tokens);
        for (row, token) in x.chunks_exact_mut(hidden).zip(tokens) {
            self.embedding.row_to_f32(*token as usize, row);
            row.iter_mut().for_each(|x| *x *= self.embedding_scale);
        }
        for (at, layer) in self.layers.iter().enumerate() {
            let mut normed = x.clone();
            layer.before_attention.apply(&mut normed);
            let attended = self.attention(at, layer, &normed, &rows, &turns, runs)?;
            add(&mut x, layer.attention_out.apply(&attended, self.isa)?, layer.after_attention.as_ref());

            normed.copy_from_slice(&x);
            layer.before_feed_forward.apply(&mut normed);
            let [gate, up] = [&layer.gate, &layer.up];
            let (gate, up) = rayon::join(|| gate.apply(&normed, self.isa), || up.apply(&normed, self.isa));
            let (mut wide, up) = (gate?, up?);
            wide.iter_mut().zip(up).for_each(|(gate, up)| *gate = (layer.activation)(*gate) * up);
            add(&mut x, layer.down.apply(&wide, self.isa)?, layer.after_feed_forward.as_ref());
        }
        runs.iter_mut().for_each(|run| run.cache.advance(run.tokens.len()));
        self.norm.apply(&mut x);
        Ok(x)
    }

    fn check(&self, runs: &[Run<'_>]) -> Result<(), ModelError> {
        let limit = self.config.max_positions;
        for run in runs {
            let length = run.cache.len() + run.tokens.len();
            if length > limit {
                return Err(ModelError::TooLong { length, limit });
            }
            let vocab_size = self.vocab_size();
            if let Some(&token) = run.tokens.iter().find(|token| **token as usize >= vocab_size) {
                return Err(ModelError::Token { token, vocab_size });
            }
        }
        Ok(())
    }

    /// Adds keys and values to the caches, and returns the outputs of the heads, `[rows, heads * head_dim]`.
    fn attention(
        &self,
        at: usize,
        layer: &Layer<'_>,
        x: &[f32],
        rows: &[Place],
        turns: &[Vec<(f32, f32)>],
        runs: &mut [Run<'_>],
    ) -> Result<Vec<f32>, ModelError> {
        let (heads, kv_heads, dim) = (self.config.heads, self.config.kv_heads, self.config.head_dim);
        let positioned = |linear: &Linear<'_>, norm: Option<&Norm>, heads: usize| -> Result<Vec<f32>, ModelError> {
            let mut out = linear.apply(x, self.isa)?;
            if let Some(norm) = norm {
                norm.apply(&mut out);
            }
            for (row, turns) in out.chunks_exact_mut(heads * dim).zip(turns) {
                row.chunks_exact_mut(dim).for_each(|head| self.rotary.rotate(head, turns));
            }
            Ok(out)
        };
        let norms = layer.head_norms.as_ref();
        let (queries, (keys, values)) = rayon::join(
            || positioned(&layer.query, norms.map(|[query, _]| query), heads),
            || {
                let keys = || positioned(&layer.key, norms.map(|[_, key]| key), kv_heads);
                rayon::join(keys, || layer.value.apply(x, self.isa))
            },
        );
        let (queries, keys, values) = (queries?, keys?, values?);
        let width = kv_heads * dim;
        for ((row, key), value) in rows.iter().zip(keys.chunks_exact(width)).zip(values.chunks_exact(width)) {
            let cache = runs[row.run].cache.layer(at);
            cache.keys.extend_from_slice(key);
            cache.values.extend_from_slice(value);
        }
        let caches: Vec<_> = runs.iter_mut().map(|run| &*run.cache.layer(at)).collect();
        let mut out = vec![0.0; queries.len()];
        let scores = Scores { scale: self.config.attention_scale, cap: self.config.attention_cap };
        let window = self.config.window(at).unwrap_or(usize::MAX);
        let one = |scratch: &mut Vec<f32>, (index, out): (usize, &mut [f32])| {
            let (row, head) = (&rows[index / heads], index % heads);
            let first = (row.position + 1).saturating_sub(window);
            let view = View { width, at: head / (heads / kv_heads) * dim, first, last: row.position };
            attend(&queries[index * dim..][..dim], caches[row.run], view, scores, scratch, out);
        };
        let work: usize = rows.iter().map(|row| (row.position + 1).min(window) * heads * dim).sum();
        if work < ALONE || rayon::current_num_threads() == 1 {
            let mut scratch = Vec::new();
            out.chunks_exact_mut(dim).enumerate().for_each(|item| one(&mut scratch, item));
        } else {
            out.par_chunks_exact_mut(dim).enumerate().for_each_init(Vec::new, one);
        }
        Ok(out)
    }
}

/// The run and the position of a row of the batch.
#[derive(Clone, Copy, Debug)]
struct Place {
    run: usize,
    position: usize,
}

fn places(runs: &[Run<'_>]) -> Vec<Place> {
    let of_run = |(run, r): (usize, &Run<'_>)| {
        let start = r.cache.len();
        (start..start + r.tokens.len()).map(move |position| Place { run, position })
    };
    runs.iter().enumerate().flat_map(of_run).collect()
}

/// Adds `y`, normalised by `norm`.
fn add(x: &mut [f32], mut y: Vec<f32>, norm: Option<&Norm>) {
    if let Some(norm) = norm {
        norm.apply(&mut y);
    }
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const QWEN3: &str = r#"{"model_type": "qwen3", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64,
        "attention_bias": true, "mlp_bias": true}"#;
    const GEMMA2: &str = r#"{"model_type": "gemma2", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64,
        "attn_logit_softcapping": 2, "final_logit_softcapping": 5, "query_pre_attn_scalar": 8, "sliding_window": 3}"#;

    /// Makes weights that depend on their names; their shapes come from the errors of [`Model::new`].
    fn with_model(config: &str, work: impl Fn(&Model<'_>)) {
        let config = ModelConfig::parse(config.as_bytes()).unwrap();
        let mut shapes: HashMap<String, [usize; 2]> = HashMap::new();
        shapes.insert("model.embed_tokens.weight".into(), [50, 24]);
        // Each error names one more tensor.
        loop {
            let data: HashMap<&String, Vec<f32>> = shapes.iter().map(|(name, s)| (name, values(name, s))).collect();
            let tensors = |name: &str| -> Result<Option<Matrix<'_>>, ModelError> {
                let found = shapes.get_key_value(name).map(|(name, [rows, cols])| (&data[name], *rows, *cols));
                Ok(found.map(|(data, rows, cols)| Matrix::new(data, rows, cols).unwrap()))
            };
            let missing = match Model::new(config.clone(), None, tensors) {
                Ok(model) => return work(&model),
                Err(ModelError::Missing(name)) => (name, [1, 1]),
                Err(ModelError::Shape { tensor, expected, .. }) => (tensor, expected),
                Err(other) => panic!("{other}"),
            };
            shapes.insert(missing.0, missing.1);
        }
    }

    fn with_each_model(work: impl Fn(&Model<'_>)) {
        [QWEN3, GEMMA2].into_iter().for_each(|config| with_model(config, &work));
    }

    fn values(name: &str, shape: &[usize; 2]) -> Vec<f32> {
        let salt = name.bytes().fold(7usize, |hash, byte| (hash * 31 + byte as usize) % 1_000_003);
        (0..shape[0] * shape[1]).map(|i| ((i * 7919 + salt * 13) % 1009) as f32 / 1009.0 - 0.4).collect()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn a_token_has_the_same_bits_in_every_batch_and_portion() {
        with_each_model(|model| {
            let texts: [&[u32]; 3] = [&[3, 14, 15, 9, 26, 5], &[35, 8], &[9, 7, 9, 32, 3]];
            let mut caches = [0, 1, 2].map(|_| Cache::new(model.config()));
            let mut runs: Vec<_> = caches.iter_mut().zip(texts).map(|(cache, tokens)| Run { cache, tokens }).collect();
            let together = model.forward(&mut runs).unwrap();
            let mut at = 0;
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            for text in texts {
                let mut cache = Cache::new(model.config());
                for token in text.chunks(1) {
                    let one = pool.install(|| model.forward(&mut [Run { cache: &mut cache, tokens: token }])).unwrap();
                    assert!(one.iter().all(|x| x.is_finite()) && one.iter().any(|x| *x != 0.0));
                    assert_eq!(bits(&one), bits(&together[at..at + 24]));
                    at += 24;
                }
                assert_eq!(cache.len(), text.len());
            }
            assert_eq!(at, together.len());
        });
    }

    #[test]
    fn the_order_of_tokens_matters_and_a_shortened_cache_goes_on() {
        with_each_model(|model| {
            let run = |cache: &mut Cache, tokens: &[u32]| {
                let out = model.forward(&mut [Run { cache, tokens }]).unwrap();
                bits(&out[out.len() - 24..])
            };
            let fresh = || Cache::new(model.config());
            assert_ne!(run(&mut fresh(), &[1, 2, 3]), run(&mut fresh(), &[2, 1, 3]));
            let mut cache = fresh();
            run(&mut cache, &[1, 2, 40, 41]);
            cache.truncate(2);
            assert_eq!(run(&mut cache, &[3]), run(&mut fresh(), &[1, 2, 3]));
        });
    }

    #[test]
    fn bad_calls_are_errors_that_leave_the_cache_alone() {
        with_each_model(|model| {
            let mut cache = Cache::new(model.config());
            let mut forward = |tokens: &[u32]| model.forward(&mut [Run { cache: &mut cache, tokens }]).map(drop);
            assert!(matches!(forward(&[50]), Err(ModelError::Token { token: 50, vocab_size: 50 })));
            assert!(matches!(forward(&[1; 65]), Err(ModelError::TooLong { length: 65, limit: 64 })));
            assert!(forward(&[1; 64]).is_ok());
            assert!(matches!(forward(&[1]), Err(ModelError::TooLong { length: 65, limit: 64 })));
            assert_eq!(cache.len(), 64);
        });
    }

    #[test]
    fn wrong_shapes_and_missing_tensors_are_named() {
        let config = ModelConfig::parse(QWEN3.as_bytes()).unwrap();
        let data = [0.0f32; 100];
        let found = Model::new(config.clone(), None, |_| Ok(None)).unwrap_err();
        assert_eq!(found.to_string(), "the checkpoint has no tensor model.embed_tokens.weight");
        let narrow = |_: &str| Ok(Some(Matrix::new(&data[..40], 2, 20).unwrap()));
        let found = Model::new(config, None, narrow).unwrap_err();
        assert!(matches!(found, ModelError::Shape { found: [2, 20], expected: [2, 24], .. }), "{found}");
    }
}
