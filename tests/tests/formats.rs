//! Comparison of the table of types in docs/weights.md with [`DType`].

use flash_sampling_core::DType;

const PAGE: &str = include_str!("../../docs/weights.md");

/// Returns the bits of a weight, with at most two decimal places.
fn bits(dtype: DType) -> String {
    let bits = (8 * dtype.block_bytes()) as f64 / dtype.block_elements() as f64;
    let scales = if dtype.is_scaled() { " and scales" } else { "" };
    format!("{}{scales}", (100.0 * bits).round() / 100.0)
}

#[test]
fn the_page_has_the_types_their_bits_and_their_rounding() {
    let (_, table) = PAGE.split_once("<!-- formats -->\n").expect("docs/weights.md has a marker before its table");
    let lines: Vec<&str> = table.lines().take_while(|line| line.starts_with('|')).skip(2).collect();
    for dtype in DType::ALL {
        let kernels = if dtype.is_exact_in_f32() { "exact" } else { "rounded" };
        let start = format!("| `{}` | {} | ", dtype.name(), bits(dtype));
        let end = format!(" | exact | {kernels} | {kernels} |");
        let line = lines.iter().find(|line| line.starts_with(&start) && line.ends_with(&end));
        let files = line.map(|line| &line[start.len()..line.len() - end.len()]);
        let files = files.unwrap_or_else(|| panic!("docs/weights.md lacks this line:\n{start}...{end}"));
        // GGUF files have blocks and floats. Safetensors files have types with scales, and floats.
        assert_eq!(files.contains("GGUF"), !dtype.is_scaled(), "{start}");
        assert_eq!(files.contains("safetensors"), dtype.is_scaled() || dtype.is_float(), "{start}");
    }
    assert_eq!(lines.len(), DType::ALL.len(), "a line of the table is of no type");
}
