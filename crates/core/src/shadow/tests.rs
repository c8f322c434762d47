use super::*;
use crate::backend::canonical::{canonical_dot, norm};
use crate::matrix::DType;
use half::bf16;

fn values(count: usize, salt: f32) -> Vec<f32> {
    (0..count).map(|i| ((i as f32 * 1.37 + salt).sin() * 2.0).powi(3)).collect()
}

/// The largest ratio of error and bound over all tokens, with `count` digits per element of the hidden state.
fn largest_share(weight: &[f32], cols: usize, hidden: &[f32], count: usize, shrink: f64) -> f64 {
    let rows = weight.len() / cols;
    let buffer = ShadowBuffer::new(&Matrix::new(weight, rows, cols).unwrap()).unwrap();
    let shadow = buffer.shadow();
    let mut integers = vec![0i32; cols];
    let (scale, size, error) = hidden_digits(hidden, 0.0, &mut integers);
    if count == 1 {
        integers.iter_mut().for_each(|integer| *integer = 256 * i32::from(digits(*integer)[0]));
    }
    let largest = (0..rows).map(|v| f64::from(shadow.errors()[v] + shadow.norms()[v])).fold(0.0, f64::max);
    let bound = ShadowBound::new(cols, size, error, largest).unwrap();
    let share = |v: usize| {
        let codes = &shadow.codes()[v * code_stride(cols)..][..cols];
        let sum: i64 = codes.iter().zip(&integers).map(|(c, h)| i64::from(*c) * i64::from(*h)).sum();
        let approximate = f64::from(scale) * f64::from(shadow.scales()[v]) * sum as f64;
        let exact = canonical_dot(&weight[v * cols..][..cols], hidden);
        let bound = f64::from(bound.of((f64::from(shadow.errors()[v]) * shrink) as f32, shadow.norms()[v]));
        (approximate - exact).abs() / bound
    };
    (0..rows).map(share).fold(0.0, f64::max)
}

#[test]
fn the_bound_holds() {
    for (rows, cols) in [(40, 1), (40, 2), (30, 63), (20, 64), (9, 1000)] {
        let weight = values(rows * cols, 0.3);
        for salt in [1.0, 2.0] {
            let share = largest_share(&weight, cols, &values(cols, salt), 2, 1.0);
            assert!(share <= 1.0, "[{rows}, {cols}]: {share}");
        }
    }
}

/// For a hidden state parallel to a row's residual, the error is close to the bound.
#[test]
fn smaller_bounds_do_not_hold() {
    let cols = 256;
    let weight = values(cols, 0.3);
    let buffer = ShadowBuffer::new(&Matrix::new(&weight, 1, cols).unwrap()).unwrap();
    let shadow = buffer.shadow();
    let residual: Vec<f32> =
        weight.iter().zip(shadow.codes()).map(|(w, c)| w - shadow.scales()[0] * f32::from(*c)).collect();
    assert!((norm(&residual) / f64::from(shadow.errors()[0]) - 1.0).abs() < 1e-5);
    let share = largest_share(&weight, cols, &residual, 2, 1.0);
    assert!((0.9..=1.0).contains(&share), "{share}");
    // The negative controls: an error that is too small, and one digit with the bound of two digits.
    assert!(largest_share(&weight, cols, &residual, 2, 0.9) > 1.0);
    let exact: Vec<f32> = (0..cols).map(|k| (k % 2) as f32).collect();
    let mut hidden = vec![1.0 / 256.0; cols];
    hidden[0] = 1.0;
    assert!(largest_share(&exact, cols, &hidden, 2, 1.0) <= 1.0);
    assert!(largest_share(&exact, cols, &hidden, 1, 1.0) > 1.0);
}

/// A row in blocks is the difference of scaled codes and a minimum, so its norm may be below that of its magnitudes.
#[test]
fn the_bound_of_blocks_holds_for_the_norm_of_the_row_itself() {
    let cols = 512;
    let weight: Vec<f32> = values(cols, 0.3).iter().map(|w| w / 8.0).collect();
    let minimum = 2.0f32;
    let magnitudes: Vec<f32> = weight.iter().map(|w| (w + minimum).abs() + minimum).collect();
    let mut integers = vec![0; cols];
    // A hidden state whose rounding error is parallel to the row.
    let steps = |k: usize| 127.0 * (k % 2) as f32;
    let hidden: Vec<f32> = weight.iter().enumerate().map(|(k, w)| steps(k) + 0.49 * w.clamp(-1.0, 1.0)).collect();
    let (scale, size, error) = hidden_digits(&hidden, 1.0, &mut integers);
    let copy: Vec<f32> = integers.iter().map(|&integer| integer as f32 * scale).collect();
    let difference = (canonical_dot(&weight, &hidden) - canonical_dot(&weight, &copy)).abs();
    let bound = ShadowBound::of_blocks(cols, size, error, norm(&magnitudes)).unwrap();
    let share =
        |factor: f64| difference / f64::from(bound.of((norm(&weight) * factor) as f32, norm(&magnitudes) as f32));
    assert!((0.5..=1.0).contains(&share(1.0)), "{}", share(1.0));
    // The negative control.
    assert!(share(0.5) > 1.0, "{}", share(0.5));
}

/// The Euclidean norms of a row's residual and of its copy.
fn true_norms(row: &[f32], codes: &[i8], scale: f32) -> [f64; 2] {
    let copy = codes.iter().map(|c| f64::from(scale) * f64::from(*c));
    let residual = row.iter().zip(copy.clone()).map(|(w, c)| f64::from(*w) - c);
    let norm = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>().sqrt();
    [norm(&mut residual.clone()), norm(&mut copy.clone())]
}

#[test]
fn codes_hold_a_row_up_to_half_a_step() {
    for row in [values(100, 0.1), vec![0.0; 5], vec![1e-40, -1e-41], vec![1.0], vec![-3e38, 1e30], vec![1.1e-36; 9]] {
        let mut codes = vec![99; row.len()];
        let [scale, error, size] = shadow_row(&row, &mut codes);
        let half = if scale > 0.0 { 0.5001 * f64::from(scale) } else { 127.0 * f64::from(f32::MIN_POSITIVE) };
        let residual = |(w, c): (&f32, &i8)| f64::from(*w) - f64::from(scale) * f64::from(*c);
        assert!(row.iter().zip(&codes).map(residual).all(|difference| difference.abs() <= half), "{row:?}");
        let [true_error, true_size] = true_norms(&row, &codes, scale);
        assert!(true_error <= f64::from(error), "{row:?}");
        assert!(true_size <= f64::from(size), "{row:?}");
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert_eq!(shadow_row(&[1.0, bad, 2.0], &mut [1; 3]), [0.0, f32::INFINITY, 0.0]);
    }
}

/// The negative control of the direction in which errors are rounded. The bound of the first row is tight: its codes are 0,
/// and its norm is the square root of 2 times the least float32. The margin of the second row is 2^-20, at most 16 steps, and
/// two roundings.
#[test]
fn errors_that_are_rounded_down_do_not_hold() {
    for (row, steps) in [(vec![f32::from_bits(1); 2], 1), (values(100, 0.1), 18)] {
        let mut codes = vec![99; row.len()];
        let [scale, error, _] = shadow_row(&row, &mut codes);
        let [true_error, _] = true_norms(&row, &codes, scale);
        let below = (0..steps).fold(error, |error, _| error.next_down());
        assert!(true_error <= f64::from(error), "{true_error:e} > {error:e}");
        assert!(true_error > f64::from(below), "{true_error:e} <= {below:e}");
    }
}

#[test]
fn digits_hold_a_hidden_state() {
    let mut hidden = values(500, 0.7);
    hidden[77] = -40.0;
    let mut copy = vec![0i32; 500];
    let (scale, size, error) = hidden_digits(&hidden, 0.0, &mut copy);
    assert_eq!(copy[77], -32_639);
    for (x, &integer) in hidden.iter().zip(&copy) {
        let [high, low] = digits(integer).map(i32::from);
        assert_eq!((256 * high + low, integer), (integer, (x * (1.0 / scale)).round_ties_even() as i32), "{x}");
    }
    let difference: Vec<f32> =
        hidden.iter().zip(&copy).map(|(x, c)| (f64::from(*x) - f64::from(scale) * f64::from(*c)) as f32).collect();
    assert!((size - norm(&hidden)).abs() < 1e-9 && (error - norm(&difference)).abs() < 1e-6);
    assert!(error < 1e-3 * size);
    // A larger scale, as far as one digit needs it.
    let most = hidden.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    for (coarsest, want) in [(0.01, 0.01), (f32::INFINITY, (most / 127.0).next_up()), (1e-9, scale)] {
        let (found, _, error) = hidden_digits(&hidden, coarsest, &mut copy);
        assert!(found == want && error <= f64::from(want) * 500f64.sqrt() / 2.0, "{coarsest}: {found}, {error}");
        let is_one_digit = copy.iter().all(|&integer| digits(integer)[0] == 0);
        assert_eq!(is_one_digit, coarsest == f32::INFINITY);
    }
    for bad in [f32::NAN, f32::INFINITY] {
        let (_, size, _) = hidden_digits(&[1.0, bad], 0.0, &mut [0; 2]);
        assert!(!size.is_finite() && ShadowBound::new(2, size, 0.0, 1.0).is_none());
    }
    let mut zeros = [1; 3];
    assert_eq!((hidden_digits(&[0.0; 3], 0.0, &mut zeros), zeros), ((0.0, 0.0, 0.0), [0; 3]));
    // The scale of these would be subnormal.
    let mut tiny = [1; 2];
    let (scale, size, error) = hidden_digits(&[1e-34, -1e-34], 0.0, &mut tiny);
    assert!(scale == 0.0 && tiny == [0; 2] && error >= size);
    for largest in [f32::MAX, 4e-34, 32_639.0] {
        // Halves. Many of their products with the inverse scale are ties.
        let scale = (largest / 32_639.0).next_up();
        let mut halves: Vec<f32> = (0..200).map(|i| (i as f32 - 99.5) * scale).collect();
        halves.push(-largest);
        let mut integers = vec![0; halves.len()];
        assert_eq!(hidden_digits(&halves, 0.0, &mut integers).0, scale);
        let is_tie = |x: &&f32| (**x * (1.0 / scale)).fract().abs() == 0.5;
        assert!(halves.iter().filter(is_tie).count() > 50, "{largest}");
        let want: Vec<i32> = halves.iter().map(|x| (x * (1.0 / scale)).round_ties_even() as i32).collect();
        assert_eq!(integers, want, "{largest}");
    }
    assert!(ShadowBound::new(2, 1e20, 0.0, 1e20).is_none());
}

#[test]
fn parts_of_other_sizes_are_refused() {
    let weight: Vec<bf16> = values(300 * 3, 0.0).into_iter().map(bf16::from_f32).collect();
    let buffer = ShadowBuffer::new(&Matrix::new(&weight, 300, 3).unwrap()).unwrap();
    let shadow = buffer.shadow();
    let parts = [shadow.scales(), shadow.errors(), shadow.norms()];
    assert!(Shadow::new(shadow.codes(), 3, parts).is_ok());
    let error = Shadow::new(&shadow.codes()[1..], 3, parts).unwrap_err();
    assert!(error.to_string().contains("codes"), "{error}");
    assert!(Shadow::new(shadow.codes(), 3, [parts[0], parts[1], &parts[2][1..]]).is_err());
    let some = shadow.row_range(256..300);
    assert_eq!((some.rows(), some.codes()), (44, &shadow.codes()[256 * 64..]));
    let blocks = Matrix::from_bytes(&[0; 34], DType::Q8_0, 1, 32, 32).unwrap();
    assert!(matches!(ShadowBuffer::new(&blocks), Err(HeadError::ShadowType { dtype: DType::Q8_0 })));
}
