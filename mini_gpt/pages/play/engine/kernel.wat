;; y = x Wᵀ in float32, with four products at a time (SIMD). kernel.js has the binary of this file.
;; Two rows of x with four rows of W at a time: eight sums of four partial sums each, which stay in registers.
;; The partial sums are added as (0 + 2) + (1 + 3). Zeros before a row move its products to other partial sums; its sum
;; stays the same, bit for bit.
;;
;; x: rows × inputs, W: outputs × inputs, y: rows × outputs, in the memory that the page gives; x, w, y are addresses.
;; rows is even; inputs and outputs are multiples of four. stride: bytes of a row of W.
(module
  (memory (import "page" "memory") 1)

  ;; The four sums of a, b, c and d, as one vector.
  (func $sums (param $a v128) (param $b v128) (param $c v128) (param $d v128) (result v128)
    (local $ab v128) (local $cd v128)
    ;; (a0 + a2, b0 + b2, a1 + a3, b1 + b3), and the same of c and d
    (local.set $ab (f32x4.add
      (i8x16.shuffle 0 1 2 3 16 17 18 19 4 5 6 7 20 21 22 23 (local.get $a) (local.get $b))
      (i8x16.shuffle 8 9 10 11 24 25 26 27 12 13 14 15 28 29 30 31 (local.get $a) (local.get $b))))
    (local.set $cd (f32x4.add
      (i8x16.shuffle 0 1 2 3 16 17 18 19 4 5 6 7 20 21 22 23 (local.get $c) (local.get $d))
      (i8x16.shuffle 8 9 10 11 24 25 26 27 12 13 14 15 28 29 30 31 (local.get $c) (local.get $d))))
    (f32x4.add
      (i8x16.shuffle 0 1 2 3 4 5 6 7 16 17 18 19 20 21 22 23 (local.get $ab) (local.get $cd))
      (i8x16.shuffle 8 9 10 11 12 13 14 15 24 25 26 27 28 29 30 31 (local.get $ab) (local.get $cd))))

  (func (export "product") (param $x i32) (param $w i32) (param $y i32)
      (param $rows i32) (param $inputs i32) (param $outputs i32) (param $stride i32)
    (local $o i32) (local $r i32) (local $k i32) ;; counted down
    (local $p i32) (local $q i32) (local $to i32) ;; in x: a row and the next one; in y
    (local $w0 i32) (local $w1 i32) (local $w2 i32) (local $w3 i32)
    (local $a v128) (local $b v128) (local $c v128)
    (local $a0 v128) (local $a1 v128) (local $a2 v128) (local $a3 v128)
    (local $b0 v128) (local $b1 v128) (local $b2 v128) (local $b3 v128)
    (local.set $o (local.get $outputs))
    (loop $each_four_outputs
      (local.set $p (local.get $x))
      (local.set $to (local.get $y))
      (local.set $r (local.get $rows))
      (loop $each_two_rows
        (local.set $q (i32.add (local.get $p) (i32.shl (local.get $inputs) (i32.const 2))))
        (local.set $w0 (local.get $w))
        (local.set $w1 (i32.add (local.get $w0) (local.get $stride)))
        (local.set $w2 (i32.add (local.get $w1) (local.get $stride)))
        (local.set $w3 (i32.add (local.get $w2) (local.get $stride)))
        (local.set $a0 (v128.const i32x4 0 0 0 0))
        (local.set $a1 (local.get $a0))
        (local.set $a2 (local.get $a0))
        (local.set $a3 (local.get $a0))
        (local.set $b0 (local.get $a0))
        (local.set $b1 (local.get $a0))
        (local.set $b2 (local.get $a0))
        (local.set $b3 (local.get $a0))
        (local.set $k (local.get $inputs))
        (loop $each_four_inputs
          (local.set $a (v128.load (local.get $p)))
          (local.set $b (v128.load (local.get $q)))
          (local.set $c (v128.load (local.get $w0)))
          (local.set $a0 (f32x4.add (local.get $a0) (f32x4.mul (local.get $a) (local.get $c))))
          (local.set $b0 (f32x4.add (local.get $b0) (f32x4.mul (local.get $b) (local.get $c))))
          (local.set $c (v128.load (local.get $w1)))
          (local.set $a1 (f32x4.add (local.get $a1) (f32x4.mul (local.get $a) (local.get $c))))
          (local.set $b1 (f32x4.add (local.get $b1) (f32x4.mul (local.get $b) (local.get $c))))
          (local.set $c (v128.load (local.get $w2)))
          (local.set $a2 (f32x4.add (local.get $a2) (f32x4.mul (local.get $a) (local.get $c))))
          (local.set $b2 (f32x4.add (local.get $b2) (f32x4.mul (local.get $b) (local.get $c))))
          (local.set $c (v128.load (local.get $w3)))
          (local.set $a3 (f32x4.add (local.get $a3) (f32x4.mul (local.get $a) (local.get $c))))
          (local.set $b3 (f32x4.add (local.get $b3) (f32x4.mul (local.get $b) (local.get $c))))
          (local.set $p (i32.add (local.get $p) (i32.const 16)))
          (local.set $q (i32.add (local.get $q) (i32.const 16)))
          (local.set $w0 (i32.add (local.get $w0) (i32.const 16)))
          (local.set $w1 (i32.add (local.get $w1) (i32.const 16)))
          (local.set $w2 (i32.add (local.get $w2) (i32.const 16)))
          (local.set $w3 (i32.add (local.get $w3) (i32.const 16)))
          (br_if $each_four_inputs (local.tee $k (i32.sub (local.get $k) (i32.const 4)))))
        (v128.store (local.get $to)
          (call $sums (local.get $a0) (local.get $a1) (local.get $a2) (local.get $a3)))
        (local.set $to (i32.add (local.get $to) (i32.shl (local.get $outputs) (i32.const 2))))
        (v128.store (local.get $to)
          (call $sums (local.get $b0) (local.get $b1) (local.get $b2) (local.get $b3)))
        (local.set $to (i32.add (local.get $to) (i32.shl (local.get $outputs) (i32.const 2))))
        (local.set $p (local.get $q)) ;; q is at the end of its row
        (br_if $each_two_rows (local.tee $r (i32.sub (local.get $r) (i32.const 2)))))
      (local.set $w (i32.add (local.get $w) (i32.shl (local.get $stride) (i32.const 2))))
      (local.set $y (i32.add (local.get $y) (i32.const 16)))
      (br_if $each_four_outputs (local.tee $o (i32.sub (local.get $o) (i32.const 4)))))))
