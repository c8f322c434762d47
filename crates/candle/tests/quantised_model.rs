//! A model with tied quantised weights writes the same tokens with a fused head as with logits of the dequantized weight.
#![allow(missing_docs)]

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Device, Module, Result, Tensor};
use flash_sampling::{CpuOptions, Plan};
use flash_sampling_candle::{FusedHead, HeadOptions, LogitsProcessor, Sampling};
use std::sync::Arc;

const VOCAB: usize = 300;
const HIDDEN: usize = 256;

/// A recurrent model: the state of a text is a function of the earlier state and the embedding of the last token.
struct Model {
    embedding: Arc<QTensor>,
    layer: QMatMul,
    state: Tensor,
}

impl Model {
    fn new(dtype: GgmlDType) -> Result<Model> {
        let values = |rows: usize, salt: f32| {
            let value = |i: usize| (i as f32 * 0.7311 + salt).sin() * (i as f32 * 0.0137 + salt).cos();
            let values: Vec<f32> = (0..rows * HIDDEN).map(value).collect();
            Tensor::from_vec(values, (rows, HIDDEN), &Device::Cpu)
        };
        let embedding = Arc::new(QTensor::quantize(&values(VOCAB, 0.3)?, dtype)?);
        let layer = QMatMul::from_qtensor(QTensor::quantize(&values(HIDDEN, 1.7)?, dtype)?)?;
        Ok(Model { embedding, layer, state: Tensor::zeros((1, 1, HIDDEN), candle_core::DType::F32, &Device::Cpu)? })
    }

    /// Hidden states `[1, 1, hidden]` after a token.
    fn forward(&mut self, token: u32) -> Result<Tensor> {
        let input = self.embedding.embedding(&Tensor::new(&[[token]], &Device::Cpu)?)?;
        self.state = ((self.layer.forward(&self.state)? * 0.3)? + input)?.tanh()?;
        &self.state * 0.2
    }
}

/// A text of 24 tokens, each drawn by `next` from the hidden states.
fn text(model: &mut Model, mut next: impl FnMut(&Tensor) -> Result<u32>) -> Vec<u32> {
    model.state = model.state.zeros_like().unwrap();
    let mut token = 7;
    let step = |_| {
        token = next(&model.forward(token).unwrap()).unwrap();
        token
    };
    (0..24).map(step).collect()
}

fn fused(weight: &Arc<QTensor>) -> FusedHead {
    FusedHead::from_qtensor(weight.clone(), HeadOptions::default(), Plan::default(), &CpuOptions::default()).unwrap()
}

#[test]
fn texts_are_those_of_the_dequantized_weight() {
    let temperature = 0.9;
    for dtype in [GgmlDType::Q8_0, GgmlDType::Q4_0, GgmlDType::Q4K, GgmlDType::Q5K, GgmlDType::Q6K] {
        let mut model = Model::new(dtype).unwrap();
        let weight = model.embedding.clone();
        let plain = weight.dequantize(&Device::Cpu).unwrap().t().unwrap();
        let mut texts = Vec::new();
        for sampling in [
            Sampling::ArgMax,
            Sampling::All { temperature },
            Sampling::GumbelSoftmax { temperature: 1.3 },
            Sampling::TopK { k: 12, temperature },
            Sampling::TopK { k: VOCAB + 1, temperature },
            Sampling::TopP { p: 0.8, temperature },
            Sampling::TopKThenTopP { k: 12, p: 1.0, temperature },
        ] {
            let (mut of_logits, mut of_head) =
                (LogitsProcessor::from_sampling(5, sampling.clone()), LogitsProcessor::from_sampling(5, sampling));
            let mut head = fused(&weight);
            let found = text(&mut model, |hidden| of_head.sample_head(&mut head, hidden));
            let expected =
                text(&mut model, |hidden| of_logits.sample(&hidden.flatten_to(1)?.matmul(&plain)?.flatten_all()?));
            assert_eq!(found, expected, "{dtype:?}");
            texts.push(found);
        }
        // The same noise decides: `All` and `TopK` of the whole vocabulary agree, greedy differs.
        assert!(texts[1] == texts[4] && texts[0] != texts[1] && texts[1] != texts[2]);
    }
}

#[test]
fn refusals_leave_the_processor_as_it_was() {
    let mut model = Model::new(GgmlDType::Q6K).unwrap();
    let hidden = model.forward(7).unwrap();
    let mut head = fused(&model.embedding);
    let both = Sampling::TopKThenTopP { k: 12, p: 0.5, temperature: 1.0 };
    let message = LogitsProcessor::from_sampling(5, both).sample_head(&mut head, &hidden).unwrap_err().to_string();
    assert!(message.contains("TopKThenTopP"), "{message}");
    let none = Sampling::TopK { k: 0, temperature: 1.0 };
    assert!(LogitsProcessor::from_sampling(5, none).sample_head(&mut head, &hidden).is_err());

    let new = || LogitsProcessor::new(5, Some(1.0), None);
    let (mut refused, mut plain) = (new(), new());
    assert!(refused.sample_head(&mut head, &hidden.narrow(2, 0, HIDDEN - 1).unwrap()).is_err());
    assert!(refused.sample_head(&mut head, &Tensor::cat(&[&hidden, &hidden], 1).unwrap()).is_err());
    let rows = [hidden.clone(), hidden.flatten_all().unwrap(), hidden.flatten_to(1).unwrap()];
    for row in rows {
        assert_eq!(refused.sample_head(&mut head, &row).unwrap(), plain.sample_head(&mut head, &hidden).unwrap());
    }
}
