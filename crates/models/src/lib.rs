//! A plain forward pass of language models on the CPU. Its hidden states are the input of a
//! [`flash_sampling::PerturbedArgmax`].
//!
//! | module | content |
//! | --- | --- |
//! | [`config`] | the configuration of a model, from `config.json`: [`ModelConfig`] |
//! | [`quantization`] | the form of 8-bit weights, from `config.json`: [`Quantization`] |
//! | [`gguf`] | files of llama.cpp: their container, and the configuration in their metadata |
//! | [`rotary`] | rotary positions, with the scalings `linear` and `llama3` |
//! | [`cache`] | the keys and values of one sequence: [`Cache`] |
//! | [`model`] | the layers: [`Model`] |
//!
//! Families: Llama, Qwen3 (dense) and Gemma 2, as Hugging Face's `transformers` defines them. Weights are borrowed in
//! bf16, f16, f32, 8 bits with scales or quantised blocks, and multiplied by [`flash_sampling::cpu::matmul`]; activations
//! are float32.
//!
//! # Replay
//! The hidden states of a token have the same bits in every batch, for a prompt at once or token by token, and on any
//! number of threads: every sum has one order, which depends only on the sequence. Another instruction set rounds
//! differently.
#![forbid(unsafe_code)]

mod attention;
pub mod cache;
pub mod config;
mod error;
mod gemma2;
pub mod gguf;
mod layer;
pub mod model;
pub mod quantization;
pub mod rotary;

pub use cache::Cache;
pub use config::{Family, ModelConfig};
pub use error::ModelError;
pub use model::{Model, Run};
pub use quantization::Quantization;
