//! int8 and fp8 weights with scales from safetensors: models of `generate` and heads of `sample`.

use crate::common::{Files, assert_same_sequence, f32_bytes, generate, run, values, words};
use crate::eight_bit_files::{EightBits, Form, Stored, scale_bytes, write, write_shards};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};

fn compressed(format: &str, weights: &Value) -> Value {
    let groups = json!({"group_0": {"targets": ["Linear"], "weights": weights}});
    json!({"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]})
}

/// The forms of published checkpoints, with small blocks for small models.
fn forms() -> Vec<Form> {
    let (fp8, int8, suffix) = (Dtype::F8_E4M3, Dtype::I8, "_scale");
    let channel = |kind: &str| json!({"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": true});
    let blocks = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "24x16"});
    let group = json!({"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16});
    let by_row = Form {
        of: "llama",
        dtype: fp8,
        block: [1, 0],
        suffix,
        scale_type: Dtype::F32,
        dimensions: 2,
        config: compressed("float-quantized", &channel("float")),
    };
    let by_tensor = json!({"quant_method": "fp8", "activation_scheme": "static"});
    let in_blocks = json!({"quant_method": "fp8", "weight_block_size": [16, 24], "activation_scheme": "dynamic"});
    vec![
        by_row.clone(),
        Form {
            of: "qwen3",
            dtype: int8,
            scale_type: Dtype::BF16,
            config: compressed("int-quantized", &channel("int")),
            ..by_row.clone()
        },
        Form { block: [0, 0], dimensions: 0, config: by_tensor, ..by_row.clone() },
        Form {
            of: "qwen3",
            block: [16, 24],
            suffix: "_scale_inv",
            scale_type: Dtype::BF16,
            config: in_blocks,
            ..by_row.clone()
        },
        Form { block: [24, 16], config: compressed("float-quantized", &blocks), ..by_row.clone() },
        Form {
            dtype: int8,
            block: [1, 16],
            scale_type: Dtype::F16,
            config: compressed("int-quantized", &group),
            ..by_row
        },
    ]
}

#[test]
fn eight_bit_checkpoints_give_the_greedy_tokens_of_their_float32_expansion() {
    for form in forms() {
        let (files, expanded) = (Files::new(), Files::new());
        form.write(&files, &expanded);
        for prompt in ["a", "The~naive~fox", "0123456789"] {
            let flags = format!("--temperature 0 --max-tokens 24 --logprobs 1 --prompt {prompt}");
            let [found, wide] =
                [&files, &expanded].map(|files| generate(&format!("--model {} {flags}", files.folder().display())));
            assert_same_sequence(&found[0], &wide[0], 1e-4, &format!("{form:?}: {prompt}"));
        }
    }
}

const SHAPE: [usize; 2] = [300, 160];

/// A head whose scales are powers of two, so its float32 expansion is exact.
fn head(dtype: Dtype, block: [usize; 2]) -> EightBits {
    let mut head = EightBits::nearest(&values(SHAPE[0] * SHAPE[1], 1), SHAPE, dtype, block, Dtype::F32);
    let exponent = if dtype == Dtype::I8 { -10 } else { -12 };
    for (at, scale) in head.scales.iter_mut().enumerate() {
        *scale = 2f32.powi(exponent + (at * 7 % 5) as i32);
    }
    head
}

fn scales(head: &EightBits, name: &str, dtype: Dtype, shape: &[usize]) -> Stored {
    (name.into(), dtype, shape.to_vec(), scale_bytes(dtype, &head.scales))
}

/// Draws by `sample --canonical`.
fn draw(files: &Files, flags: &str) -> Vec<Vec<u64>> {
    let hidden = files.npy("h.npy", &[2, 160], &values(2 * 160, 9));
    run(&words(&format!("sample --format json --canonical --draws 20 --hidden {hidden} {flags}"))).tokens()
}

/// A canonical plan draws the same token from the same real weights in any type.
#[test]
fn every_form_of_scales_gives_the_draws_of_the_same_real_weights() {
    let files = Files::new();
    let mut seen = Vec::new();
    for (dtype, block, shape, suffix, scale_type) in [
        (Dtype::F8_E4M3, SHAPE, &[][..], "_scale", Dtype::F32),
        (Dtype::F8_E4M3, SHAPE, &[1], "_scale_inv", Dtype::BF16),
        (Dtype::I8, SHAPE, &[1, 1], "_scale", Dtype::F16),
        (Dtype::F8_E4M3, [1, 160], &[300], "_scale", Dtype::F16),
        (Dtype::I8, [1, 160], &[300, 1], "_scale", Dtype::BF16),
        (Dtype::F8_E4M3, [128, 128], &[3, 2], "_scale_inv", Dtype::F32),
        (Dtype::I8, [128, 128], &[3, 2], "_scale", Dtype::BF16),
    ] {
        let head = head(dtype, block);
        let wide = ("w".into(), Dtype::F32, SHAPE.to_vec(), f32_bytes(&head.expanded()));
        let expected = draw(&files, &format!("--weight {}", write(&files, "wide.safetensors", &[wide])));
        let tensors = [head.stored("w"), scales(&head, &format!("w{suffix}"), scale_type, shape)];
        let file = write(&files, "w.safetensors", &tensors);
        assert_eq!(draw(&files, &format!("--weight {file}")), expected, "{dtype:?} {shape:?}");
        assert_eq!(draw(&files, &format!("--weight {file}:w")), expected, "{dtype:?} {shape:?}");
        seen.push(expected);
    }
    // The scales matter.
    assert_ne!(seen[0], seen[3]);
    assert_ne!(seen[3], seen[5]);
}

#[test]
fn the_scales_of_a_checkpoint_are_in_any_shard_with_the_blocks_of_its_config() {
    let (files, block) = (Files::new(), [64, 48]);
    let head = head(Dtype::F8_E4M3, block);
    let stored = scales(&head, "lm_head.weight_scale_inv", Dtype::BF16, &[5, 4]);
    write_shards(&files, &[vec![stored], vec![head.stored("lm_head.weight")]]);
    let model = format!("--model {}", files.folder().display());
    let wide = ("w".into(), Dtype::F32, SHAPE.to_vec(), f32_bytes(&head.expanded()));
    let expected = draw(&files, &format!("--weight {}", write(&files, "wide.safetensors", &[wide])));
    let config = |method: &str| {
        let config = json!({"quantization_config": {"quant_method": method, "weight_block_size": block}});
        files.bytes("config.json", config.to_string().as_bytes());
    };
    config("fp8");
    assert_eq!(draw(&files, &model), expected);
    let refused = |says: &str| {
        run(&words(&format!("sample {model} --hidden {}", files.name("h.npy")))).assert_refused(says);
    };
    config("awq");
    refused("config.json: quantization_config: quant_method is \"awq\"; fp8 and compressed-tensors are supported");
    files.bytes("config.json", b"{}");
    refused(
        "0.safetensors: lm_head.weight_scale_inv has shape [5, 4], expected [], [1], [300], [300, 1], or [3, 2] for",
    );
    write_shards(&files, &[vec![], vec![head.stored("lm_head.weight")]]);
    refused("there is neither lm_head.weight_scale nor lm_head.weight_scale_inv");
    // A head of floats does not need the configuration.
    let wide = ("lm_head.weight".into(), Dtype::F32, SHAPE.to_vec(), f32_bytes(&head.expanded()));
    write_shards(&files, &[vec![wide]]);
    config("awq");
    assert_eq!(draw(&files, &model), expected);
}

#[test]
fn scales_that_cannot_be_used_are_named() {
    let (files, head) = (Files::new(), head(Dtype::I8, [1, 160]));
    let hidden = files.npy("h.npy", &[2, 160], &values(2 * 160, 9));
    let sample = |more: &[Stored], flags: &str| {
        let file = write(&files, "w.safetensors", &[&[head.stored("w")], more].concat());
        run(&words(&format!("sample --format json --weight {file}:w {flags}")))
    };
    let refused = |more: &[Stored], says: &str| {
        sample(more, &format!("--hidden {hidden}")).assert_refused(&format!("w.safetensors: {says}"));
    };
    let good = scales(&head, "w_scale", Dtype::F32, &[300, 1]);
    let other = |name: &str, dtype, shape: &[usize], bytes| (name.to_string(), dtype, shape.to_vec(), bytes);
    refused(&[], "w has elements of 8 bits without scales: there is neither w_scale nor w_scale_inv");
    refused(&[scales(&head, "v_scale", Dtype::F32, &[300, 1])], "w has elements of 8 bits without scales");
    let twice = [good.clone(), scales(&head, "w_scale_inv", Dtype::F32, &[300, 1])];
    refused(&twice, "w has both w_scale and w_scale_inv; only one can be meant");
    refused(&[scales(&head, "w_scale", Dtype::F32, &[1, 300])], "w_scale has shape [1, 300], expected [], [1], [300]");
    refused(&[other("w_scale", Dtype::F64, &[300], vec![0; 2400])], "w_scale has dtype F64, expected bf16, f16 or f32");
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut with_bad = head.scales.clone();
        with_bad[299] = bad;
        let says = format!("w_scale has the scale {bad} at index 299");
        refused(&[other("w_scale", Dtype::F32, &[300], f32_bytes(&with_bad))], &says);
    }
    let zero_point = |value: u8| other("w_zero_point", Dtype::I8, &[300, 1], vec![value; 300]);
    refused(&[good.clone(), zero_point(1)], "w_zero_point is not zero, which is not supported");
    assert_eq!(sample(&[good.clone(), zero_point(0)], &format!("--hidden {hidden}")).code, 0);
    let order = other("w_g_idx", Dtype::I32, &[160], vec![0; 640]);
    refused(&[good.clone(), order], "w_g_idx gives the columns another order");
    let as_hidden = sample(&[good], &format!("--hidden {}:w", files.name("w.safetensors")));
    as_hidden.assert_refused("w has dtype i8, expected bf16, f16 or f32");
}

#[test]
fn other_quantised_checkpoints_are_refused_by_name() {
    let form = forms().swap_remove(0);
    let (files, expanded) = (Files::new(), Files::new());
    for (config, says) in [
        (json!({"quant_method": "gptq", "bits": 8}), "quantization_config: quant_method is \"gptq\""),
        (json!({"quant_method": "bitsandbytes"}), "quantization_config: quant_method is \"bitsandbytes\""),
        (compressed("pack-quantized", &json!(null)), "quantization_config: format is \"pack-quantized\""),
        (compressed("int-quantized", &json!({"num_bits": 4})), "quantization_config: num_bits is 4"),
        (compressed("int-quantized", &json!({"symmetric": false})), "quantization_config: symmetric is false"),
    ] {
        Form { config, ..form.clone() }.write(&files, &expanded);
        run(&["generate", "--model", files.folder().to_str().unwrap()]).assert_refused(says);
    }
    // Blocks of another size than the scales have.
    let config = json!({"quant_method": "fp8", "weight_block_size": [32, 32]});
    Form { config, ..forms().swap_remove(4) }.write(&files, &expanded);
    let says = "_scale has shape [";
    run(&["generate", "--model", files.folder().to_str().unwrap()]).assert_refused(says);
}
