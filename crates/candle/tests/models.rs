//! The models of `flash-sampling generate` have the logits of candle-transformers' models, up to rounding: after a
//! prompt at once, and after each further token.
#![allow(missing_docs)]

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, qwen3};
use flash_sampling::{Matrix, cpu::matmul};
use flash_sampling_models::{Cache, Model, ModelConfig, Run};
use half::bf16;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const PROMPT: [u32; 7] = [72, 9, 200, 31, 31, 5, 118];
const NEXT: [u32; 6] = [0, 255, 64, 64, 17, 3];
/// The largest difference of a logit, relative to the largest logit: two layers in float32 with other orders of
/// summation.
const TOLERANCE: f32 = 5e-6;

/// A folder of the command's crate.
fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli").join(name)
}

/// The configuration of a checkpoint for candle's types, and its tensors.
fn checkpoint(name: &str) -> (Value, HashMap<String, Tensor>) {
    let folder = folder(name);
    let mut config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    // candle reads the keys of versions before `rope_parameters`.
    if let Some(rope) = config.get("rope_parameters").cloned() {
        config["rope_theta"] = rope["rope_theta"].clone();
        if rope["rope_type"] != json!("default") {
            config["rope_scaling"] = rope;
        }
    }
    let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let shards = files.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    let tensors = shards.flat_map(|path| candle_core::safetensors::load(path, &Device::Cpu).unwrap()).collect();
    (config, tensors)
}

/// The logits of our model after the prompt and after each further token, by the stored bf16 weights.
fn ours(config: &Value, tensors: &HashMap<String, Tensor>) -> Vec<Vec<f32>> {
    let stored: HashMap<&str, (Vec<bf16>, [usize; 2])> = tensors
        .iter()
        .map(|(name, tensor)| {
            let shape = match *tensor.dims() {
                [cols] => [1, cols],
                [rows, cols] => [rows, cols],
                _ => panic!("{name} has {:?}", tensor.dims()),
            };
            (name.as_str(), (tensor.flatten_all().unwrap().to_vec1().unwrap(), shape))
        })
        .collect();
    let matrix = |name: &str| {
        stored.get(name).map(|(values, [rows, cols])| Matrix::new(values.as_slice(), *rows, *cols).unwrap())
    };
    let config = ModelConfig::parse(config.to_string().as_bytes()).unwrap();
    let hidden_size = config.hidden;
    let model = Model::new(config, None, |name| Ok(matrix(name))).unwrap();
    let head = matrix("lm_head.weight").or(matrix("model.embed_tokens.weight")).unwrap();
    let mut cache = Cache::new(model.config());
    let mut logits = |tokens: &[u32]| {
        let hidden = model.forward(&mut [Run { cache: &mut cache, tokens }]).unwrap();
        let last = Matrix::new(&hidden[hidden.len() - hidden_size..], 1, hidden_size).unwrap();
        let mut out = vec![0.0; head.rows()];
        matmul(&last, &head, None, &mut out).unwrap();
        out
    };
    [logits(&PROMPT)].into_iter().chain(NEXT.map(|token| logits(&[token]))).collect()
}

/// The logits of a candle model, which takes tokens `[1, length]` and the number of earlier tokens.
fn candles(mut logits: impl FnMut(&Tensor, usize) -> candle_core::Result<Tensor>) -> Vec<Vec<f32>> {
    let mut at = 0;
    let mut run = |tokens: &[u32]| {
        let input = Tensor::new(tokens, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let out = logits(&input, at).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        at += tokens.len();
        out
    };
    [run(&PROMPT)].into_iter().chain(NEXT.map(|token| run(&[token]))).collect()
}

fn assert_alike(ours: &[Vec<f32>], candles: &[Vec<f32>], name: &str) {
    assert_eq!(ours.len(), candles.len());
    for (step, (a, b)) in ours.iter().zip(candles).enumerate() {
        assert_eq!(a.len(), b.len());
        let largest = b.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let apart = a.iter().zip(b).fold(0.0f32, |apart, (a, b)| apart.max((a - b).abs()));
        println!("{name}, step {step}: largest logit {largest}, apart {apart:e}");
        assert!(largest > 0.5 && apart <= TOLERANCE * largest, "{name}, step {step}: {apart} of {largest}");
    }
    // The negative control: a model without a cache would agree on the first step alone.
    assert_ne!(ours[3], ours[4], "the same token at two places");
}

fn builder(tensors: &HashMap<String, Tensor>) -> VarBuilder<'static> {
    let wide = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.to_dtype(DType::F32).unwrap()));
    VarBuilder::from_tensors(wide.collect(), DType::F32, &Device::Cpu)
}

fn llama_is_candles(name: &str) {
    let (mut config, tensors) = checkpoint(name);
    // candle's Llama has no biases: both run without them.
    (config["attention_bias"], config["mlp_bias"]) = (json!(false), json!(false));
    let theirs: llama::LlamaConfig = serde_json::from_value(config.clone()).unwrap();
    let theirs = theirs.into_config(false);
    let model = llama::Llama::load(builder(&tensors), &theirs).unwrap();
    let mut cache = llama::Cache::new(true, DType::F32, &theirs, &Device::Cpu).unwrap();
    let candles = candles(|input, at| model.forward(input, at, &mut cache));
    assert_alike(&ours(&config, &tensors), &candles, name);
}

#[test]
fn a_random_llama_has_candles_logits() {
    llama_is_candles("tests/checkpoints/llama");
}

#[test]
fn the_built_in_model_has_candles_logits() {
    llama_is_candles("models/stories");
}

#[test]
fn a_random_qwen3_has_candles_logits() {
    let name = "tests/checkpoints/qwen3";
    let (config, tensors) = checkpoint(name);
    let theirs: qwen3::Config = serde_json::from_value(config.clone()).unwrap();
    let mut model = qwen3::ModelForCausalLM::new(&theirs, builder(&tensors)).unwrap();
    let candles = candles(|input, at| model.forward(input, at));
    assert_alike(&ours(&config, &tensors), &candles, name);
}
